"""Findings: one line each, the worst counts, numbers that people can read."""

from __future__ import annotations

import pytest

from kvxfer.doctor.facts import FindingGroup, FindingState, one_line, size, some, worst

GROUP = FindingGroup("group")


def test_a_finding_is_one_line_whatever_was_found() -> None:
    finding = GROUP.problem("check", "first\n  second\t third", "do\nthis")
    assert (finding.found, finding.advice) == ("first second third", "do this")
    assert (finding.group, finding.check, finding.state) == ("group", "check", FindingState.PROBLEM)


def test_the_worst_counts() -> None:
    found = [GROUP.not_here("a", ""), GROUP.ok("b", ""), GROUP.warning("c", "", "x"), GROUP.problem("d", "", "x")]
    assert [worst(found[: count + 1]) for count in range(4)] == [
        FindingState.NOT_HERE,
        FindingState.OK,
        FindingState.WARNING,
        FindingState.PROBLEM,
    ]
    assert worst([]) is FindingState.OK


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (8 << 20, "8 MiB"),
        (3 << 39, "1.5 TiB"),
    ],
)
def test_sizes(value: int, expected: str) -> None:
    assert size(value) == expected


def test_lists_stay_short() -> None:
    assert some(range(3)) == "0, 1, 2"
    assert some(range(10), limit=2) == "0, 1 and 8 more"
    assert some(()) == ""
    assert one_line(" a \n b ") == "a b"
