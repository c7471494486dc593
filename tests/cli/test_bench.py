"""`kvxfer bench`: wrong arguments are one clear line and nothing is measured."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from kvxfer.cli import bench, main


def plan(*words: str) -> Any:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    return bench.plan_of(parser.parse_args(words))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--workloads", "W9"), "W9"),
        (("--transports", "rdma"), "rdma"),
        (("--rounds", "0"), "--rounds"),
        (("--tolerance", "-1"), "--tolerance"),
        (("--peers", "100000"), "--peers"),
        (("--option", "nothing=3"), "NAME=VALUE"),
        (("--option", "tcp_streams=many"), "tcp_streams"),
        (("--option", "secret=x"), "NAME=VALUE"),
        (("--check", "no/such/file.json"), "no/such/file.json"),
        (("--json", "no/such/dir/rows.json"), "cannot write"),
    ],
)
def test_wrong_arguments(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.count("\n") == 1
    assert not shown.out


def test_a_baseline_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "b.json").write_text("{")
    assert main(["bench", "--check", str(tmp_path / "b.json")]) == 2
    assert "not JSON" in capsys.readouterr().err


def test_plans() -> None:
    chosen = plan("--workloads", "w5,W1,w1", "--option", "tcp_streams=4", "--quick", "--peers", "64")
    assert chosen.workloads == ("W5", "W1", "W2")
    assert chosen.options == {"tcp_streams": 4}
    assert chosen.sizes.peers == 64
    assert chosen.limit_s is not None
    assert plan("--rounds", "7").limit_s is None
