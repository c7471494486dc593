"""Charts are well-formed XML, whatever is drawn."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.bench.svg import HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, bar_chart, line_chart

SPACE = "{http://www.w3.org/2000/svg}"
NUMBERS = st.floats(min_value=0, max_value=1e12)
NAMES = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=12)


@given(st.lists(st.tuples(NAMES, st.lists(st.tuples(NUMBERS, NUMBERS), max_size=5)), max_size=8), st.booleans(), NAMES)
def test_lines(series: list[tuple[str, list[tuple[float, float]]]], log: bool, title: str) -> None:
    root = ElementTree.fromstring(line_chart(title, Axis("x", log=log), Axis("<y>", log=log), series))
    for line in root.iter(f"{SPACE}polyline"):
        for pair in line.attrib["points"].split():
            across, down = (float(number) for number in pair.split(","))
            assert LEFT - 0.1 <= across <= WIDTH - RIGHT + 0.1
            assert TOP - 0.1 <= down <= HEIGHT


@given(st.lists(st.tuples(NAMES, st.lists(st.tuples(NAMES, NUMBERS), max_size=4)), max_size=4))
def test_bars(groups: list[tuple[str, list[tuple[str, float]]]]) -> None:
    root = ElementTree.fromstring(bar_chart("a & b", Axis("y"), groups))
    for bar in root.iter(f"{SPACE}rect"):
        assert float(bar.attrib["height"]) >= 0


def test_what_is_drawn() -> None:
    text = line_chart("t", Axis("x", log=True), Axis("y"), [("one", [(1, 1), (10, 2), (100, 4)]), ("none", [])])
    root = ElementTree.fromstring(text)
    [line] = root.iter(f"{SPACE}polyline")
    heights = [float(pair.split(",")[1]) for pair in line.attrib["points"].split()]
    assert heights == sorted(heights, reverse=True)
    words = {element.text for element in root.iter(f"{SPACE}text")}
    assert {"one", "x", "y", "100"} <= words
    assert "none" not in words


def test_nothing_measured_is_said() -> None:
    assert "not measured" in line_chart("t", Axis("x"), Axis("y"), [])
    assert "not measured" in bar_chart("t", Axis("y"), [("shm", [])])


@pytest.mark.parametrize(("axis", "values"), [(Axis("a"), [3.0, 7.0]), (Axis("a", log=True), [0.02, 700.0])])
def test_ticks_cover_the_values(axis: Axis, values: list[float]) -> None:
    low, high = axis.limits(values)
    ticks = axis.ticks(low, high)
    assert 2 <= len(ticks) <= 12
    assert low <= min(values)
    assert high >= max(values)
    assert all(0 <= axis.place(tick, low, high) <= 1.001 for tick in ticks)
