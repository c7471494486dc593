"""Ratios are taken within a round, to the right yardstick and to every rival."""

from __future__ import annotations

import pytest

from kvxfer.bench.ratios import compared, is_ratio, of_round
from kvxfer.bench.rows import combine, single

ROUND = [
    single("kvxfer", "shm", "W2", "get_GBps", 12.0),
    single("kvxfer", "shm", "W2", "get_ms", 20.0),
    single("kvxfer", "shm", "W2u", "get_GBps", 6.0),
    single("kvxfer", "tcp", "W1", "get_4k_p50_us", 60.0),
    single("kvxfer", "tcp", "W2u", "put_GBps", 5.0),
    single("ref memfd+memcpy", "shm", "W2", "get_GBps", 8.0),
    single("ref memfd+NT copy", "shm", "W2", "get_GBps", 16.0),
    single("ref memfd+NT copy, 2 threads", "shm", "W2", "get_GBps", 24.0),
    single("ref process_vm", "shm", "W2u", "get_GBps", 5.0),
    single("NIXL default(cma) READ", "shm", "W2", "get_GBps", 10.0),
    single("UCX C shm put", "shm", "W2", "get_GBps", 9.0),
    single("ref C tcp, per-socket reno", "tcp", "W1", "put_4k_p50_us", 50.0),
    single("ref C tcp, per-socket reno", "tcp", "W2", "put_GBps", 5.0),
    single("py socket, reno", "tcp", "W1", "get_4k_p50_us", 80.0),
    single("gRPC bidi stream", "tcp", "W1", "get_4k_p50_us", 300.0),
    single("nothing", "tcp", "W1", "get_4k_p50_us", 0.0),
]


def test_yardstick_and_hardest_rival() -> None:
    found = {one.row.key: one for one in compared([*ROUND, *of_round(ROUND)])}
    large = found["kvxfer", "shm", "W2", "get_GBps"]
    assert (large.reference_text, large.rival_text) == ("0.75", "1.20 (NIXL default(cma) READ)")
    small = found["kvxfer", "tcp", "W1", "get_4k_p50_us"]
    assert (small.reference_text, small.rival_text) == ("1.20", "0.20 (gRPC bidi stream)")
    assert found["kvxfer", "shm", "W2", "get_ms"].rival is None


def test_memory_of_the_user_has_its_own_yardstick_where_it_matters() -> None:
    found = {one.row.key: one for one in compared([*ROUND, *of_round(ROUND)])}
    user = found["kvxfer", "shm", "W2u", "get_GBps"]
    assert (user.reference_text, user.rival_text) == ("1.20", "0.60 (NIXL default(cma) READ)")
    assert found["kvxfer", "tcp", "W2u", "put_GBps"].reference_text == "1.00"


def test_the_median_is_one_of_quotients() -> None:
    rounds = [(10.0, 10.0), (1.0, 2.0), (9.0, 9.0)]
    rows = []
    for ours, theirs in rounds:
        here = [
            single("kvxfer", "shm", "W2", "put_GBps", ours),
            single("ref memfd+NT copy", "shm", "W2", "put_GBps", theirs),
        ]
        rows += [*here, *of_round(here)]
    [ratio] = [row for row in combine(rows) if is_ratio(row)]
    assert (ratio.median, ratio.low, ratio.high, ratio.n) == (1.0, 0.5, 1.0, 3)
    assert ratio.peer == "kvxfer / ref memfd+NT copy"


@pytest.mark.parametrize("metric", ["put_GBps", "put_4k_p50_us"])
def test_nothing_to_compare_with(metric: str) -> None:
    assert of_round([single("kvxfer", "shm", "W2", metric, 1.0)]) == []
