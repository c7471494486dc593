"""What a person is told: one line for a good run, everything needed to look further for a bad one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from tests.support.sim.run import Plan, Result, Simulation

COMMAND = "python -m tests.support.sim"
SHOWN_BEFORE, SHOWN_AFTER = 40, 5
VIOLATIONS_SHOWN = 5


def replay_command(result: Result) -> str:
    """What to type to see it again."""
    changed = replace(Plan.of(result.seed)) != result.plan
    extra = ""
    if changed:
        plan = result.plan
        faults = "--faults" if plan.faults else "--no-faults"
        extra = f" --hosts {plan.hosts} --workers {plan.workers} --flows {plan.flows} --span {plan.span_s:g} {faults}"
        extra += f" --kinds {' '.join(plan.kinds)}" if plan.kinds else ""
        extra += f" --work {' '.join(plan.work)}" if plan.work else ""
    mutation = f" --mutation {result.mutation}" if result.mutation else ""
    return f"{COMMAND} --seed {result.seed}{extra}{mutation} --trace"


def failure(result: Result) -> str:
    """A failing seed: what broke, the way back to it, and the last events before it."""
    lines: list[str] = []
    Simulation(result.seed, plan=result.plan, mutation=result.mutation, show=lines.append).run()
    at = next((index for index, line in enumerate(lines) if " WRONG " in line), len(lines))
    shown = [str(violation) for violation in result.violations[:VIOLATIONS_SHOWN]]
    more = len(result.violations) - len(shown)
    return "\n".join(
        [
            f"seed {result.seed} FAILED: {len(result.violations)} broken promises",
            *(f"  {text}" for text in shown),
            *([f"  and {more} more"] if more > 0 else []),
            f"replay it with: {replay_command(result)}",
            "the events before the first of them:",
            *(f"  {line}" for line in lines[max(0, at - SHOWN_BEFORE) : at + SHOWN_AFTER]),
        ]
    )


def one_line(result: Result) -> str:
    """A seed in one line."""
    plan = result.plan
    word = "ok" if not result.violations else "FAILED"
    how = f"{result.faults} faults" if plan.faults else "no faults"
    return (
        f"seed {result.seed}: {word}, {plan.hosts} nodes, {plan.workers} workers, {how}, {result.transfers} transfers, "
        f"{result.steps} steps, {result.virtual_s:.1f} s in {result.cpu_s:.3f} s, trace {result.digest}"
    )


def summary(results: Iterable[Result]) -> str:
    """All seeds together."""
    found = list(results)
    transfers = sum(result.transfers for result in found)
    cpu_s = sum(result.cpu_s for result in found)
    outcomes: Counter[str] = Counter()
    for result in found:
        outcomes.update(result.outcomes)
    failed = sum(bool(result.violations) for result in found)
    rate = 60 * transfers / cpu_s if cpu_s else 0.0
    shown = ", ".join(f"{name} {count}" for name, count in outcomes.most_common())
    return (
        f"{len(found)} seeds, {failed} failed; {transfers} transfers, {sum(result.faults for result in found)} faults, "
        f"{sum(result.virtual_s for result in found):.0f} virtual seconds; "
        f"{rate:.0f} transfers per minute and core\nhow their parts ended: {shown}"
    )
