"""The judge of a soak: catches what grows, tolerates what wobbles."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.soak.choices import flows, trouble
from tests.support.soak.judge import MIB, PER_TRANSFERS, POINTS_MAX, Limit, Series, judge, judge_all, slope

RSS = Limit(per_transfers=2 * MIB, floor=4 * MIB)


def series(values: list[float], step: int = 1000) -> Series:
    found = Series()
    for at, value in enumerate(values):
        found.add(at * step, value)
    return found


def noisy(rng: Random, *, rise: float, count: int = 100, wobble: float = 1500.0) -> list[float]:
    return [50_000 + rise * at + rng.uniform(-wobble, wobble) for at in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_flat_and_a_leak_beneath_the_noise_is_not(seed: int) -> None:
    rng = Random(seed)
    assert judge("rss_kib", series(noisy(rng, rise=0)), RSS).flat
    leak = 0.1 * 1000  # 100 bytes per transfer, a thousand transfers per sample
    verdict = judge("rss_kib", series(noisy(rng, rise=leak)), RSS)
    assert not verdict.flat
    assert verdict.slope == pytest.approx(0.1 * PER_TRANSFERS, rel=0.2)
    assert "per 50000 transfers" in verdict.why


def test_one_jump_and_one_spike_are_no_slope() -> None:
    spike = [50_000.0] * 100
    spike[97] = 900_000.0
    assert judge("rss_kib", series(spike), RSS).flat
    warm_up = [50_000.0 + min(at, 20) * 1000 for at in range(100)]
    assert judge("rss_kib", series(warm_up), RSS).flat


def test_what_fills_up_and_stops_is_no_leak_and_one_that_begins_late_is() -> None:
    fills = [50_000.0 + min(at, 60) * 100 for at in range(100)]
    assert slope(series(fills).settled) * PER_TRANSFERS > 2 * MIB
    assert judge("rss_kib", series(fills), RSS).flat
    late = [50_000.0 + max(0, at - 40) * 300 for at in range(100)]
    assert "rises to the end" in judge("rss_kib", series(late), RSS).why


@pytest.mark.parametrize("name", ["w rss_kib", "w shmem_kib", "w maps", "w objects"])
def test_an_amount_is_judged_when_caches_had_time_to_fill(name: str) -> None:
    short, long = series([1e6 * at for at in range(20)], 500), series([1e6 * at for at in range(50)], 500)
    (too_short,) = judge_all({name: short})
    assert (too_short.judged, too_short.flat) == (False, True)
    (leak,) = judge_all({name: long})
    assert (leak.judged, leak.flat) == (True, False)


def test_the_closing_sample_has_the_last_word() -> None:
    left, kept = series([1.0] * 10 + [6.0] * 10), series([1.0] * 10 + [6.0] * 10)
    left.closing, kept.closing = 1.0, 4.0
    assert judge("w tasks", left, Limit(floor=1)).flat
    assert judge("w tasks", kept, Limit(floor=1)).why == "never came back to what it was: from 1 to 4"


def test_a_small_rise_in_a_short_run_proves_nothing() -> None:
    assert judge("rss_kib", series([1000.0 + 30 * at for at in range(20)], 100), RSS).flat


@pytest.mark.parametrize(("values", "flat"), [
    ([5.0] * 30, True),
    ([5.0, 6.0, 5.0, 7.0] * 8, True),
    ([5.0] * 15 + [6.0] * 15, False),
    ([5.0 + at // 5 for at in range(30)], False),
    ([9.0] * 15 + [5.0] * 15, True),
    ([5.0] * 29 + [50.0], True),
])  # fmt: skip
def test_a_count_has_to_come_back(values: list[float], flat: bool) -> None:
    verdict = judge("x grants", series(values), Limit())
    assert verdict.flat is flat, verdict


def test_the_last_word_of_a_name_chooses_the_limit() -> None:
    rising = [5.0] * 15 + [6.0] * 15
    verdicts = judge_all({"worker a fds": series(rising), "worker a grants": series(rising)})
    assert {one.name: one.flat for one in verdicts} == {"worker a fds": True, "worker a grants": False}


def test_a_series_is_bounded_and_keeps_its_slope() -> None:
    found = series([float(at) for at in range(100_000)], 1)
    assert len(found.points) < POINTS_MAX
    assert slope(found.settled) == pytest.approx(1, rel=0.01)
    assert found.settled[0][0] >= 25_000


def test_nothing_and_too_little_are_flat_and_say_so() -> None:
    nothing, little = judge("x", Series(), RSS), judge("x", series([1.0, 1e9]), RSS)
    assert (nothing.points, nothing.judged, nothing.flat) == (0, False, True)
    assert (little.points, little.judged, little.flat) == (1, False, True)


def test_a_permit_at_rest_is_wrong_in_any_sample_however_short_the_run() -> None:
    clean, leaks, at_the_end = series([0.0] * 40), series([0.0, 2.0]), series([0.0] * 3)
    at_the_end.closing = 1.0
    verdicts = judge_all({"a permits": clean, "b permits": leaks, "c permits": at_the_end})
    assert [one.flat for one in verdicts] == [True, False, False]
    assert "is 2 at rest, where 0 is right" in verdicts[1].why


def test_choices_follow_from_the_seed() -> None:
    first = flows(7, "lane", 3, 500, maps=True, patience=4)
    assert first == flows(7, "lane", 3, 500, maps=True, patience=4)
    assert first != flows(8, "lane", 3, 500, maps=True, patience=4)
    assert {flow.kind for flow in first} == {"put", "get", "push", "pull", "land", "churn"}
    assert {flow.kind for flow in flows(7, "lane", 3, 500, maps=False, patience=4)} == {
        "put", "get", "push", "pull", "churn",
    }  # fmt: skip
    assert 40 < sum(flow.cancel_s is not None for flow in first) < 120
    assert [trouble(7, number) for number in range(50)] == [trouble(7, number) for number in range(50)]
    assert {trouble(7, number).victim for number in range(50)} == {"", "worker", "daemon"}
