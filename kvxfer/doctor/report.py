"""Findings as text for people and as JSON for tools."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby

from kvxfer.doctor.finding import Finding, State, worst

_MARKS = {State.OK: "ok", State.WARNING: "warning", State.PROBLEM: "PROBLEM", State.NOT_HERE: "not here"}
_MARK_CHARS = 9
_CHECK_CHARS_MAX = 28


def as_text(findings: Sequence[Finding], *, simulated: bool) -> str:
    """One line per finding, what to do below it, and a summary."""
    width = min(max((len(finding.check) for finding in findings), default=0), _CHECK_CHARS_MAX)
    lines = [SIMULATED, ""] if simulated else []
    for group, members in groupby(findings, key=lambda finding: finding.group):
        lines.append(group)
        for finding in members:
            lines.append(f"  {_MARKS[finding.state]:<{_MARK_CHARS}}{finding.check:<{width}}  {finding.found}")
            if finding.advice:
                lines.append(f"{'':{_MARK_CHARS + width + 4}}-> {finding.advice}")
        lines.append("")
    counts = Counter(finding.state for finding in findings)
    lines.append(", ".join(f"{counts[state]} {state.value}" for state in State))
    if simulated:
        lines += ["", SIMULATED]
    return "\n".join(lines)


SIMULATED = "*** THE ACCELERATOR IS A SIMULATION: nothing here says anything about hardware ***"


def as_json(findings: Sequence[Finding], *, simulated: bool) -> str:
    """One object: the worst state, whether an accelerator is simulated, every finding."""
    rows = [{**asdict(finding), "state": finding.state.value} for finding in findings]
    return json.dumps({"state": worst(findings).value, "simulated": simulated, "findings": rows}, indent=2)
