"""`make bench-compare`: other data movers take turns in a real run, and the goals judge it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import compare, rivals
from benchmarks.rivals import RIVALS
from kvxfer.bench.ratios import PLAIN_SOCKETS
from kvxfer.bench.rows import Row, RunOptions, loads, single
from kvxfer.errors import TransportError


def words(folder: Path, *more: str) -> list[str]:
    files = ["--json", str(folder / "rows.json"), "--html", str(folder / "page.html")]
    small = ["--tiny", "--rounds", "1", "--workloads", "W2", "--transports", "tcp", "--peers", "2"]
    return [*small, *files, *more]


@pytest.mark.once
def test_rivals_take_turns_and_the_goals_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    async def measure(name: str, workload: str, options: RunOptions) -> list[Row]:
        asked.append(f"{name} {workload}")
        if name == "ucx":
            raise TransportError("it fell over")
        return [single("NIXL tcp WRITE", "tcp", workload, "put_GBps", 0.001)]

    there = dict.fromkeys(RIVALS) | {"redis": "redis-server is not on the PATH"}
    monkeypatch.setattr(rivals, "available", lambda: there)
    monkeypatch.setattr(rivals, "measure", measure)
    assert compare.main(words(tmp_path, "--compare", "nixl,ucx,redis")) == 0
    assert sorted(asked) == ["nixl W2", "ucx W2"]
    rows = loads((tmp_path / "rows.json").read_text())
    judged = [row for row in rows if row.peer.startswith("goal ")]
    assert {row.unit for row in judged} <= {"met", "missed"}
    assert any(row.workload == "W2" for row in judged)
    assert any(row.peer == "kvxfer / NIXL tcp WRITE" and row.median > 1 for row in rows)
    assert "<h2>Goals</h2>" in (tmp_path / "page.html").read_text()
    shown = capsys.readouterr().out
    for said in ("goals: ", "redis-server is not on the PATH", "ucx in W2: it fell over"):
        assert said in shown, said


@pytest.mark.parametrize(
    ("wrong", "said"), [(("--compare", "carrier-pigeon"), "carrier-pigeon"), (("--rounds", "0"), "--rounds")]
)
def test_wrong_arguments(wrong: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([*wrong]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert not shown.out


def test_the_package_knows_which_names_are_plain_sockets() -> None:
    labels = {
        label for name in ("tcp", "iperf3") for variant in RIVALS[name].variants for label in variant.labels.values()
    }
    assert labels == PLAIN_SOCKETS
