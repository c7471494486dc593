"""Deadlines: the current one of each key counts, and the heap stays small."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvxfer.rendezvous.postings import Timeline

STEPS = st.lists(st.tuples(st.sampled_from(["set", "drop", "pop"]), st.integers(0, 4), st.integers(0, 9)), max_size=80)


def test_order_and_ties() -> None:
    timeline: Timeline[str] = Timeline()
    for key, at in (("late", 5.0), ("first", 1.0), ("second", 1.0), ("moved", 1.0)):
        timeline.set(key, at)
    timeline.set("moved", 9.0)
    timeline.drop("nobody")
    assert timeline.next() == 1.0
    assert timeline.pop_due(0.5) == []
    assert timeline.pop_due(5.0) == ["first", "second", "late"]
    assert (timeline.next(), len(timeline)) == (9.0, 1)


def test_renewing_for_ever_costs_nothing() -> None:
    timeline: Timeline[int] = Timeline()
    for turn in range(10_000):
        timeline.set(turn % 10, float(turn))
    assert len(timeline._heap) < 200
    assert timeline.pop_due(1e9) == list(range(10))


@given(STEPS)
def test_against_a_dict(steps: list[tuple[str, int, int]]) -> None:
    timeline: Timeline[int] = Timeline()
    model: dict[int, int] = {}
    for what, key, at in steps:
        if what == "set":
            timeline.set(key, at)
            model[key] = at
        elif what == "drop":
            timeline.drop(key)
            model.pop(key, None)
        else:
            due = timeline.pop_due(at)
            assert sorted(due) == sorted(name for name, when in model.items() if when <= at)
            assert [model[name] for name in due] == sorted(model[name] for name in due)
            model = {name: when for name, when in model.items() if when > at}
        assert timeline.next() == min(model.values(), default=None)
        assert len(timeline) == len(model)
