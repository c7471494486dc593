"""The text report: aligned columns, ratios, what is missing."""

from __future__ import annotations

from kvxfer.bench.ratios import of_round
from kvxfer.bench.rows import single
from kvxfer.bench.run import Result
from kvxfer.bench.table import aligned, number, text

ROWS = [
    single("kvxfer", "shm", "W2", "get_GBps", 12.0),
    single("kvxfer", "shm", "W2", "get_ms", 20.0),
    single("kvxfer", "tcp", "W1", "get_4k_p50_us", 60.0),
    single("kvxfer", "shm", "blocks/4096", "get_GBps", 3.0),
    single("ref memfd+memcpy", "shm", "W2", "get_GBps", 8.0),
    single("ref memfd+NT copy", "shm", "W2", "get_GBps", 16.0),
    single("NIXL default(cma) READ", "shm", "W2", "get_GBps", 10.0),
    single("UCX C shm put", "shm", "W2", "get_GBps", 9.0),
    single("ref C tcp, per-socket reno", "tcp", "W1", "put_4k_p50_us", 50.0),
    single("py socket, reno", "tcp", "W1", "get_4k_p50_us", 80.0),
    single("gRPC bidi stream", "tcp", "W1", "get_4k_p50_us", 300.0),
]


def test_the_report_shows_what_is_missing_and_no_curves() -> None:
    result = Result(
        rows=[*ROWS, *of_round(ROWS)],
        missing={"nixl": "not installed: make bench-peers"},
        machine={"CPU": "one"},
        rounds=5,
    )
    report = text(result)
    assert "missing: nixl: not installed: make bench-peers" in report
    assert "interleaved rounds: 5" in report
    assert "blocks/4096" not in report
    assert "1.20 (NIXL default(cma) READ)" in report
    assert "kvxfer / " not in report


def test_columns_line_up() -> None:
    lines = aligned(("a", "number"), [("longer", "1"), ("b", "22")], 1).splitlines()
    assert lines == ["a       number", "longer       1", "b           22"]


def test_numbers_have_three_digits() -> None:
    assert [number(value) for value in (0, 0.01234, 1.234, 12.34, 999.9, 12345.6)] == [
        *("0", "0.0123", "1.23", "12.3", "1e+03", "12,346")
    ]
