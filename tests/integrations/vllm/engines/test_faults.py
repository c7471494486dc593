"""Bytes that do not arrive, or arrive damaged, and caches that must not be mistaken for each other."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm.engines.harness import pair, prompts

pytestmark = pytest.mark.full
TOKENS = 12


def run(*, held_s: float = 1.0, **how: Any) -> dict[str, float]:
    """Six requests through a pair of engines say what the undivided engine says; the measurements of decode."""
    asked = prompts(6, seed=31)
    with tempfile.TemporaryDirectory(prefix="kvxv-") as place, pair(Path(place), **how) as engines:
        wanted = engines.reference(asked, TOKENS)
        got = engines.decode.run(asked, TOKENS, engines.prefilled(asked))
        assert [one["tokens"] for one in got] == wanted
        engines.decode.no_block_is_held()
        engines.prefill.no_block_is_held(held_s)
        return engines.decode.metrics()


def failures(metrics: dict[str, float]) -> float:
    return sum(value for name, value in metrics.items() if "failures_total" in name)


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("fault", ["flip_rate=0.5", "short_rate=0.5", "fail_rate=0.5", "hang_rate=0.3"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_damage_is_noticed_and_recomputed(transport: str, fault: str, mode: str) -> None:
    options = {"transports": [f"fault+{transport}"], "fault_spec": f"seed=3 {fault}", "integrity": True}
    metrics = run(extra={"mode": mode, "timeout_s": 5, "options": options})
    assert failures(metrics) > 0


def test_blocks_of_other_sizes_are_refused_or_right() -> None:
    metrics = run(prefill={"block_size": 32}, decode={"block_size": 64})
    assert failures(metrics) == 6  # CPU_ATTN packs its blocks: what cannot be converted is not moved


def test_a_node_without_a_daemon_computes_alone() -> None:
    # It can tell prefill nothing, which therefore keeps the blocks until its lease ends.
    metrics = run(held_s=10, extra={"lease_s": 3}, decode={"extra": {"socket": "/nonexistent/kvxferd.sock"}})
    assert failures(metrics) == 6


def test_own_memory() -> None:
    metrics = run(extra={"own_memory": True})
    assert failures(metrics) == 0
    assert metrics["vllm:kvxfer_seconds_count{received}"] == 6


def test_prefix_hits_and_a_threshold() -> None:
    asked = prompts(2, seed=32, least=300)
    extra = {"kv_recompute_threshold": 64}
    with (
        tempfile.TemporaryDirectory(prefix="kvxv-") as place,
        pair(Path(place), extra=extra, enable_prefix_caching=True) as engines,
    ):
        wanted = engines.reference(asked, TOKENS)
        assert engines.decode.ask("forget")["good"]
        for came in (2, 2):  # the second time decode has all but the last block itself
            got = engines.decode.run(asked, TOKENS, engines.prefilled(asked))
            assert [one["tokens"] for one in got] == wanted
            assert engines.decode.metrics()["vllm:kvxfer_seconds_count{received}"] == came
            engines.nothing_is_held()
