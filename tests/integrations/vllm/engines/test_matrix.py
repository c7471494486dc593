"""Every model, transport and mode through the same cases (`make test-vllm FULL=1`): a pair of engines for each."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm.engines.harness import Pair, pair, prompts, until

pytestmark = pytest.mark.full
TOKENS = 12
RECEIVED = "vllm:kvxfer_seconds_count{received}"

EVERY = [
    (model, transport, mode)
    for model in ("llama", "qwen", "sliding")
    for transport in ("shm", "tcp")
    for mode in ("pull", "push", "layerwise")
]


@pytest.fixture(scope="module", params=EVERY, ids="-".join)
def engines(request: pytest.FixtureRequest) -> Iterator[Pair]:
    model, transport, mode = request.param
    extra = {"mode": mode, "timeout_s": 15, "options": {"transports": [transport]}}
    # Prompts are computed in chunks of 128 tokens, so most of them in several steps.
    chunked = {"max_num_batched_tokens": 128}
    with (
        tempfile.TemporaryDirectory(prefix="kvxv-") as place,
        pair(Path(place), model, extra=extra, prefill=chunked, policy="recompute") as made,
    ):
        made.mode, made.exact = mode, model != "qwen"
        yield made


def decode(engines: Pair, asked: list[list[int]]) -> list[Any]:
    if engines.mode == "layerwise":
        return engines.streamed(asked, TOKENS)
    return engines.decode.run(asked, TOKENS, engines.prefilled(asked))


def same(engines: Pair, asked: list[list[int]], got: list[Any]) -> None:
    """Equal for float32; a bfloat16 model may be at a near tie that another batch decides otherwise."""
    wanted = engines.reference(asked, TOKENS)
    unlike = [index for index, one in enumerate(got) if one["tokens"] != wanted[index]]
    assert len(unlike) <= (0 if engines.exact else 1), unlike
    assert all(one["reason"] == "length" for one in got)


def test_one_after_the_other(engines: Pair) -> None:
    asked = prompts(3, seed=21)
    got = [decode(engines, [prompt])[0] for prompt in asked]
    same(engines, asked, got)
    assert engines.decode.metrics()[RECEIVED] == 3
    engines.nothing_is_held()


def test_eight_at_once(engines: Pair) -> None:
    asked = prompts(8, seed=22, most=600)
    before = engines.decode.metrics()[RECEIVED]
    same(engines, asked, decode(engines, asked))
    assert engines.decode.metrics()[RECEIVED] - before == 8
    engines.nothing_is_held()


def test_aborted(engines: Pair) -> None:
    asked = prompts(3, seed=23, least=300)
    if engines.mode == "layerwise":
        for index, prompt in enumerate(asked):
            params = {"do_remote_prefill": True, "transfer_id": f"alone-{index}"}
            engines.decode.ask("add_and_abort", id=f"a-{index}", prompt=prompt, tokens=4, params=params, steps=index)
    else:
        for index, params in enumerate(engines.prefilled(asked)):
            how = {"prompt": asked[index], "tokens": 4, "params": params, "steps": index}
            engines.decode.ask("add_and_abort", id=f"a-{index}", **how)
    engines.nothing_is_held()


def test_prefill_dies_with_the_requests_in_it(engines: Pair) -> None:
    asked = prompts(4, seed=24, least=300)
    if engines.mode == "layerwise":
        where = [f"127.0.0.1:{engines.nodes['d'].port}"]
        for index, prompt in enumerate(asked):
            name = f"dies-{index}"
            engines.decode.add(name, prompt, TOKENS, {"do_remote_prefill": True, "transfer_id": name})
            params = {"do_remote_decode": True, "transfer_id": name, "remote_node": where}
            engines.prefill.add(name, prompt, 1, params)
    else:
        for index, params in enumerate(engines.prefilled(asked)):
            engines.decode.add(f"dies-{index}", asked[index], TOKENS, params)
    engines.prefill.kill()
    same(engines, asked, [engines.decode.result(f"dies-{index}") for index in range(len(asked))])
    engines.decode.no_block_is_held()


def test_the_daemon_of_decode_dies(engines: Pair) -> None:
    """Prefill is dead already: what is asked fails at once or at its deadline, and is computed here."""
    asked = prompts(2, seed=25)
    engines.nodes["d"].kill()
    names = [f"alone-{index}" for index in range(len(asked))]
    for name, prompt in zip(names, asked, strict=True):
        engines.decode.add(name, prompt, TOKENS, {"do_remote_prefill": True, "transfer_id": name})
    same(engines, asked, [engines.decode.result(name) for name in names])
    until(lambda: not engines.decode.ask("states")["states"], 20, "nothing is left")
    engines.decode.no_block_is_held()
