"""What a soak found, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvxfer.testing.soak.judge import PER_TRANSFERS, Verdict
from kvxfer.testing.soak.run import Soak


def as_dict(soak: Soak, verdicts: Sequence[Verdict], seconds: float) -> dict[str, Any]:
    """Everything, as JSON can hold it."""
    tally = soak.tally
    return {
        "seed": soak.plan.seed,
        "seconds": round(seconds, 1),
        "transfers": tally.transfers,
        "rounds": tally.rounds,
        "outcomes": dict(sorted(tally.outcomes.items())),
        "killed": dict(tally.kills),
        "wrong": tally.wrongs.count,
        "wrong_first": tally.wrongs.first,
        "series": {
            one.name: {
                "flat": one.flat,
                "first": one.first,
                "last": one.last,
                f"slope_per_{PER_TRANSFERS}": one.slope,
                "samples": one.points,
                "why": one.why,
            }
            for one in verdicts
        },
        "objects_grown": tally.grown,
        "passed": passed(soak, verdicts),
    }


def passed(soak: Soak, verdicts: Sequence[Verdict]) -> bool:
    """Nothing broken, nothing grows, and something was done."""
    return not soak.tally.wrongs.count and all(one.flat for one in verdicts) and soak.tally.transfers > 0


def as_text(soak: Soak, verdicts: Sequence[Verdict], seconds: float) -> str:
    """The same for people: what is not flat comes first."""
    tally = soak.tally
    lines = [
        f"soak: {tally.transfers} transfers in {seconds:.0f} s, seed {soak.plan.seed}, "
        f"killed: {dict(tally.kills) or 'nobody'}",
        "outcomes: " + ", ".join(f"{name} {count}" for name, count in sorted(tally.outcomes.items())),
        f"{'series':34}{'begin':>12}{'end':>12}{'slope per ' + str(PER_TRANSFERS):>18}{'samples':>9}",
    ]
    for one in sorted(verdicts, key=lambda found: (found.flat, found.name)):
        row = f"{one.name:34}{one.first:12g}{one.last:12g}{one.slope:18g}{one.points:9}"
        lines.append(row if one.flat else f"{row}  NOT FLAT: {one.why}")
    lines += [f"{who}: more objects: {kinds}" for who, kinds in sorted(tally.grown.items()) if kinds]
    lines += [f"WRONG: {text}" for text in tally.wrongs.first]
    if tally.wrongs.count > len(tally.wrongs.first):
        lines.append(f"WRONG: and {tally.wrongs.count - len(tally.wrongs.first)} more")
    lines.append("passed" if passed(soak, verdicts) else f"FAILED; play it again with --seed {soak.plan.seed}")
    return "\n".join(lines)
