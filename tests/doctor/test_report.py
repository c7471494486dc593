"""How findings are shown."""

from __future__ import annotations

import json

from kvxfer.doctor.facts import FindingGroup
from kvxfer.doctor.report import SIMULATED, as_json, as_text

ONE, TWO = FindingGroup("one"), FindingGroup("two")
FINDINGS = [
    ONE.ok("short", "fine"),
    ONE.problem("a longer name", "broken", "mend it"),
    TWO.not_here("else", "absent"),
    TWO.warning("w", "odd", "look"),
]


def test_text() -> None:
    lines = as_text(FINDINGS, simulated=False).splitlines()
    assert lines == [
        "one",
        "  ok       short          fine",
        "  PROBLEM  a longer name  broken",
        "                          -> mend it",
        "",
        "two",
        "  not here else           absent",
        "  warning  w              odd",
        "                          -> look",
        "",
        "1 ok, 1 warning, 1 problem, 1 not here",
    ]


def test_a_simulation_is_said_first_and_last() -> None:
    lines = as_text(FINDINGS, simulated=True).splitlines()
    assert (lines[0], lines[-1]) == (SIMULATED, SIMULATED)


def test_json() -> None:
    answer = json.loads(as_json(FINDINGS, simulated=True))
    assert (answer["state"], answer["simulated"]) == ("problem", True)
    assert answer["findings"][1] == {
        "group": "one",
        "check": "a longer name",
        "state": "problem",
        "found": "broken",
        "advice": "mend it",
    }
