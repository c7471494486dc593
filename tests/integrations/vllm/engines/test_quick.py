"""One pair of engines, a float32 Llama, pulled over shared memory: what must hold before anything lands.

The tests run in their order, on the same engines; the last one kills prefill.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm.engines.harness import PREFILL, Pair, pair, prompts, until

TOKENS = 16
RECEIVED = "vllm:kvxfer_seconds_count{received}"


@pytest.fixture(scope="module")
def engines() -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="kvxv-") as place, pair(Path(place), extra={"timeout_s": 10}) as made:
        yield made


def received(engines: Pair) -> float:
    """Requests that came over kvxfer, by the connector's own series."""
    return engines.decode.metrics().get(RECEIVED, 0.0)


def failures(engines: Pair) -> float:
    return sum(value for name, value in engines.decode.metrics().items() if "failures_total" in name)


def compare(engines: Pair, asked: list[list[int]], params: list[Any], *, came: int) -> None:
    """Decode with these params says what the undivided engine says, and so many of them came over kvxfer."""
    wanted = engines.reference(asked, TOKENS)
    before = received(engines)
    got = engines.decode.run(asked, TOKENS, params)
    assert [one["tokens"] for one in got] == wanted
    assert {one["reason"] for one in got} == {"length"}
    assert received(engines) - before == came


def test_eight_at_once(engines: Pair) -> None:
    asked = prompts(8)
    compare(engines, asked, engines.prefilled(asked), came=8)
    engines.nothing_is_held()
    assert failures(engines) == 0


def test_the_comparison_can_fail(engines: Pair) -> None:
    asked = prompts(3, seed=2)
    wanted = engines.reference(asked, TOKENS)
    params = engines.prefilled(asked)
    engines.prefill.ask("zero")
    got = engines.decode.run(asked, TOKENS, params)
    assert all(one["tokens"] != right for one, right in zip(got, wanted, strict=True))
    engines.nothing_is_held()


def test_aborted_before_it_is_scheduled(engines: Pair) -> None:
    asked = prompts(2, seed=3)
    for index, (prompt, params) in enumerate(zip(asked, engines.prefilled(asked), strict=True)):
        engines.decode.ask("add_and_abort", id=f"early-{index}", prompt=prompt, tokens=TOKENS, params=params)
    engines.nothing_is_held()


def test_aborted_while_it_waits(engines: Pair) -> None:
    asked = prompts(4, seed=4, least=300)
    for index, (prompt, params) in enumerate(zip(asked, engines.prefilled(asked), strict=True)):
        id = f"waits-{index}"
        engines.decode.ask("add_and_abort", id=id, prompt=prompt, tokens=TOKENS, params=params, steps=1)
    engines.nothing_is_held()


def test_aborted_while_it_runs(engines: Pair) -> None:
    asked = prompts(1, seed=5)
    (params,) = engines.prefilled(asked)
    engines.decode.add("runs", asked[0], 500, params)
    until(lambda: "RUNNING" in engines.decode.ask("states")["states"].values(), 20, "it runs")
    engines.decode.ask("abort", ids=["runs"])
    engines.nothing_is_held()


def test_preempted(engines: Pair) -> None:
    asked = prompts(2, seed=6)
    wanted = engines.reference(asked, 48)
    params = engines.prefilled(asked)
    for index, prompt in enumerate(asked):
        engines.decode.add(f"preempted-{index}", prompt, 48, params[index])
    until(lambda: set(engines.decode.ask("states")["states"].values()) == {"RUNNING"}, 20, "both run")
    assert engines.decode.ask("preempt")["good"]
    assert [engines.decode.result(f"preempted-{index}")["tokens"] for index in range(2)] == wanted
    engines.nothing_is_held()


def damaged(params: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The same with other values in kvxfer's own entry."""
    found = copy.deepcopy(params)
    found["kvxfer"].update(changes)
    return found


def test_params_that_make_no_sense_are_recomputed(engines: Pair) -> None:
    asked = prompts(7, seed=7)
    good = engines.prefilled(asked[:1])[0]
    yesterday = engines.prefilled(asked[1:2])[0]
    engines.decode.run(asked[1:2], 1, [copy.deepcopy(yesterday)])  # it was fetched: the ticket is spent
    stranger = {"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": [[1, 2]], "remote_host": "h"}
    params = [
        damaged(good, compatibility="model=another"),
        {**yesterday, "do_remote_prefill": True},
        stranger,
        damaged(good, ranks=[{"node": ["127.0.0.1:1"], "channel": "nobody"}]),
        damaged(good, format=99),
        {"do_remote_prefill": True, "kvxfer": 7, "remote_num_tokens": "many"},
        {**good, "remote_num_tokens": -1},
    ]
    before = failures(engines)
    compare(engines, asked, params, came=0)
    assert failures(engines) - before == len(params)
    engines.decode.run(asked[:1], 1, [good])  # so that prefill need not wait for its lease
    engines.nothing_is_held()


def test_policy_fail_fails_the_request_and_not_the_engine(engines: Pair) -> None:
    asked = prompts(2, seed=8)
    engines.decode.ask("policy", recompute=False)
    good = engines.prefilled(asked)
    bad = damaged(good[0], compatibility="model=another")
    got = engines.decode.run(asked, TOKENS, [bad, good[1]])
    assert [one["reason"] for one in got] == ["error", "length"]
    engines.decode.ask("policy", recompute=True)
    engines.decode.run(asked[:1], 1, good[:1])
    engines.nothing_is_held()


def test_wrong_roles(engines: Pair) -> None:
    asked = prompts(1, seed=9)
    wanted = engines.reference(asked, TOKENS)
    (answer,) = engines.decode.run(asked, 1, [PREFILL])
    assert "kv_consumer" in answer["params"]["kvxfer"]["error"]
    compare(engines, asked, [answer["params"]], came=0)  # what such a prefill answers is recomputed
    (params,) = engines.prefilled(asked)
    (got,) = engines.prefill.run(asked, TOKENS, [dict(params)])
    assert got["tokens"] == wanted[0]
    compare(engines, asked, [params], came=1)
    engines.nothing_is_held()


def test_daemons_that_restart(engines: Pair) -> None:
    asked = prompts(2, seed=10)
    for side in ("p", "d"):
        engines.nodes[side].kill()
        engines.nodes[side].start()
    for _ in range(20):  # until both workers have found their daemons again, requests are recomputed
        before = received(engines)
        got = engines.decode.run(asked, TOKENS, engines.prefilled(asked))
        assert [one["tokens"] for one in got] == engines.reference(asked, TOKENS)
        if received(engines) - before == len(asked):
            break
    else:
        raise AssertionError(f"nothing comes after a restart\n{engines.decode.tail()}")


def test_prefill_is_killed(engines: Pair) -> None:
    asked = prompts(3, seed=11)
    params = engines.prefilled(asked)
    engines.prefill.kill()
    compare(engines, asked, params, came=0)
    engines.decode.no_block_is_held()
