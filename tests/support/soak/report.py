"""What a soak found, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.soak.judge import PER_TRANSFERS, Verdict
from tests.support.soak.run import Soak

REASONS_MAX, REASON_CHARS_MAX = 8, 300


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
                "judged": one.judged,
                "first": one.first,
                "last": one.last,
                f"slope_per_{PER_TRANSFERS}": one.slope,
                "samples": one.points,
                "why": one.why,
                "points": soak.tally.table[one.name].points,
                "closing": soak.tally.table[one.name].closing,
            }
            for one in verdicts
        },
        "objects_grown": tally.grown,
        "tasks_at_rest": tally.running,
        "in_short": in_short(soak, verdicts),
        "passed": passed(soak, verdicts),
    }


def passed(soak: Soak, verdicts: Sequence[Verdict]) -> bool:
    """Nothing broken, nothing grows, and something was done."""
    return not soak.tally.wrongs.count and all(one.flat for one in verdicts) and soak.tally.transfers > 0


def in_short(soak: Soak, verdicts: Sequence[Verdict]) -> list[str]:
    """The verdict and its reasons in few lines: whatever is cut off, these are to be seen."""
    judged = sum(one.judged for one in verdicts)
    numbers = f"{judged} series judged, {len(verdicts) - judged} too short to say, seed {soak.plan.seed}"
    if passed(soak, verdicts):
        return [f"passed: {soak.tally.transfers} transfers, {numbers}"]
    reasons = [f"NOT FLAT: {one.name}: {one.why}" for one in verdicts if not one.flat]
    reasons += [f"WRONG: {text}"[:REASON_CHARS_MAX] for text in soak.tally.wrongs.first]
    reasons = reasons or ["nothing was transferred"]
    more = len(reasons) - REASONS_MAX
    shown = [*reasons[:REASONS_MAX], f"and {more} more"] if more > 0 else reasons
    return [f"FAILED: {soak.tally.transfers} transfers, {numbers}; play it again with --seed {soak.plan.seed}", *shown]


def as_text(soak: Soak, verdicts: Sequence[Verdict], seconds: float) -> str:
    """The same for people: the verdict first and last, and in the table what is not flat first."""
    tally, short = soak.tally, in_short(soak, verdicts)
    lines = [
        *short,
        f"soak: {tally.transfers} transfers in {seconds:.0f} s, seed {soak.plan.seed}, "
        f"killed: {dict(tally.kills) or 'nobody'}",
        "outcomes: " + ", ".join(f"{name} {count}" for name, count in sorted(tally.outcomes.items())),
        f"{'series':34}{'begin':>12}{'end':>12}{'slope per ' + str(PER_TRANSFERS):>18}{'samples':>9}",
    ]
    for one in sorted(verdicts, key=lambda found: (found.flat, found.name)):
        row = f"{one.name:34}{one.first:12g}{one.last:12g}{one.slope:18g}{one.points:9}"
        lines.append(f"{row}  NOT FLAT: {one.why}" if one.why else row if one.judged else f"{row}  (too short)")
    lines += [f"{who}: more objects: {kinds}" for who, kinds in sorted(tally.grown.items()) if kinds]
    lines += [f"WRONG: {text}" for text in tally.wrongs.first]
    if tally.wrongs.count > len(tally.wrongs.first):
        lines.append(f"WRONG: and {tally.wrongs.count - len(tally.wrongs.first)} more")
    return "\n".join([*lines, *short])
