"""A real transformer prefilled in one process and decoded in another: the same tokens as undivided. Needs torch and
transformers: `make test-torch`. No weights are downloaded: they are random, and the same in both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from examples.child_processes import daemon, python_process
from examples.remote_worker import Remote, WorkerFailed

pytest.importorskip("torch", reason="torch is not installed here: make test-torch has it")
pytest.importorskip("transformers", reason="transformers is not installed here: make test-torch has it")

pytestmark = [pytest.mark.once, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
STEPS = 12
# Scattered blocks of 16 tokens on one side, of 32 on the other.
SOURCE = [[17], [3, 21, 0, 8, 14], [5, 4, 23, 22, 1, 9, 13, 2]]
TARGET = [[6], [11, 2, 19], [23, 0, 7, 15]]


@asynccontextmanager
async def workers(directory: Path) -> AsyncIterator[tuple[Remote, Remote]]:
    """A prefill and a decode worker, each beside a daemon of its own."""
    async with AsyncExitStack() as stack:
        made = []
        for role in ("prefill", "decode"):
            node = await stack.enter_async_context(daemon(directory / role, name=f"node of {role}"))
            program = ["-m", "tests.integrations.real_model", role, str(node.socket)]
            environment = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            process = await stack.enter_async_context(python_process(program, name=role, environment=environment))
            made.append(Remote(process, timeout=120))
        yield made[0], made[1]


async def test_prefilled_in_one_process_and_decoded_in_another(tmp_path: Path) -> None:
    """Over shm and tcp; a model is slow to load, so that all of it is asked of one pair of workers."""
    async with workers(tmp_path) as (prefill, decode):
        for transport in ("shm", "tcp"):
            await tokens_equal_those_of_the_undivided_model(prefill, decode, transport)
            await flipped_bytes_are_noticed_before_a_token_is_decoded(prefill, decode, transport)


async def tokens_equal_those_of_the_undivided_model(prefill: Remote, decode: Remote, transport: str) -> None:
    await asyncio.gather(
        prefill.do("connect", transport=transport, own_memory=True), decode.do("connect", transport=transport)
    )
    for number, (source, target) in enumerate(zip(SOURCE, TARGET, strict=True)):
        expected = (await prefill.do("generate", number=number, steps=STEPS))["tokens"]
        given = await prefill.do("prefill", number=number, blocks=source)
        pulled = await decode.do("pull", number=number, ticket=given["ticket"], blocks=target)
        await prefill.do("published")
        assert pulled["transport"] == transport
        assert pulled["bytes"] == (11, 75, 128)[number] * 4 * 2 * 2 * 16 * 4
        found = await decode.do("decode", number=number, blocks=target, first=given["first"], steps=STEPS)
        assert found["tokens"] == expected
        await decode.do("clear")
        control = await decode.do("decode", number=number, blocks=target, first=given["first"], steps=STEPS)
        assert control["tokens"] != expected, "without the cache the tokens are others: the comparison can fail"
    await asyncio.gather(prefill.do("close"), decode.do("close"))


async def flipped_bytes_are_noticed_before_a_token_is_decoded(prefill: Remote, decode: Remote, transport: str) -> None:
    """Of a consumer whose transport damages every transfer; the ticket still serves a sound one."""
    await asyncio.gather(
        prefill.do("connect", transport=transport),
        decode.do("connect", transport=f"fault+{transport}", fault_spec="seed=1,flip_rate=1.0"),
    )
    expected = (await prefill.do("generate", number=1, steps=STEPS))["tokens"]
    given = await prefill.do("prefill", number=1, blocks=SOURCE[1])
    with pytest.raises(WorkerFailed) as caught:
        await decode.do("pull", number=1, ticket=given["ticket"], blocks=TARGET[1])
    assert caught.value.code == "integrity"
    await decode.do("close")
    await decode.do("connect", transport=transport)
    await decode.do("pull", number=1, ticket=given["ticket"], blocks=TARGET[1])
    await prefill.do("published")
    found = await decode.do("decode", number=1, blocks=TARGET[1], first=given["first"], steps=STEPS)
    assert found["tokens"] == expected
    await asyncio.gather(prefill.do("close"), decode.do("close"))
