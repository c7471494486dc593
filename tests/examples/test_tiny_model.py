"""The example model is worth comparing tokens with: a divided run gives the same ones, a damaged cache does not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from examples.tiny_model import BEGIN, ModelConfig, PagedCache, TinyModel, run_undivided, tokenize
from kvxfer.errors import GeometryMismatch
from kvxfer.geometry import BlockTable, CacheLayout, LayerPlacement
from kvxfer.planner import contiguous_layout, plan

ROOT = Path(__file__).resolve().parent.parent.parent
SLACK = float(os.environ.get("KVXFER_TEST_SLACK", "1"))
SEED, STEPS, BLOCK_TOKENS = 7, 24, 16
PROMPT = " ".join(f"{n} times {n} is {n * n}." for n in range(48)).encode()
MODEL = TinyModel(seed=SEED)


@dataclass
class Memory:
    """A cache with its table; the blocks of the table are scattered over a pool."""

    cache: PagedCache
    table: BlockTable
    bytes: np.ndarray

    @classmethod
    def made(cls, tokens: int, *, block_tokens: int = BLOCK_TOKENS, layout: str = "PBNHD", seed: int = 1) -> Memory:
        needed = -(-(tokens + STEPS) // block_tokens)
        placed, length = contiguous_layout(MODEL.geometry(block_tokens, layout=layout), needed + 5)
        memory = np.zeros(length, np.uint8)
        ids = np.random.default_rng(seed).permutation(needed + 5)[:needed]
        return cls(PagedCache(placed, memory), BlockTable(blocks=ids, tokens=tokens), memory)

    def decode(self, first: int, steps: int = STEPS) -> list[int]:
        return MODEL.decode(first, self.table.tokens, self.cache, self.table, steps)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return run_undivided(PROMPT, seed=SEED, steps=STEPS, block_tokens=BLOCK_TOKENS)[0]


@pytest.fixture(scope="module")
def prefilled() -> tuple[bytes, int]:
    tokens = tokenize(PROMPT, 8000)
    memory = Memory.made(len(tokens))
    first = MODEL.prefill(tokens, memory.cache, memory.table)
    return memory.bytes.tobytes(), first


@pytest.fixture
def filled(prefilled: tuple[bytes, int]) -> tuple[Memory, int]:
    """A cache of one's own with the prompt in it, and the first token."""
    memory = Memory.made(1 + len(PROMPT))
    memory.bytes[:] = np.frombuffer(prefilled[0], np.uint8)
    return memory, prefilled[1]


# -- divided runs -----------------------------------------------------------------------------------------------------


def test_scattered_blocks_give_the_tokens_of_the_undivided_run(filled: tuple[Memory, int], expected: list[int]) -> None:
    memory, first = filled
    assert memory.decode(first) == expected


def test_prefill_in_another_process(tmp_path: Path, expected: list[int]) -> None:
    """Only the bytes of the cache and the first token come from there."""
    script = (
        "import sys; from tests.examples.test_tiny_model import *\n"
        "tokens = tokenize(PROMPT, 8000); memory = Memory.made(len(tokens))\n"
        "first = MODEL.prefill(tokens, memory.cache, memory.table)\n"
        "memory.bytes.tofile(sys.argv[1]); print(len(tokens), first)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "cache")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60 * SLACK)
    tokens, first = map(int, done.stdout.split())
    memory = Memory.made(tokens)
    memory.bytes[:] = np.fromfile(tmp_path / "cache", np.uint8)
    assert memory.decode(first) == expected


@pytest.mark.parametrize(("block_tokens", "layout"), [(16, "BPNHD"), (32, "PBNHD"), (64, "BPHND"), (24, "PBHND")])
def test_a_planned_copy_into_another_layout(
    filled: tuple[Memory, int], expected: list[int], block_tokens: int, layout: str
) -> None:
    source, first = filled
    target = Memory.made(source.table.tokens, block_tokens=block_tokens, layout=layout, seed=2)
    made = plan(source.cache.layout, source.table, target.cache.layout, target.table)
    for layer in range(made.layers):
        for begin, to, length in made.layer(layer)[0].segments.tolist():
            target.bytes[to : to + length] = source.bytes[begin : begin + length]
    assert target.decode(first) == expected


def test_a_model_of_another_seed_is_told_apart() -> None:
    layouts = [contiguous_layout(TinyModel(seed=seed).geometry(16), 4)[0] for seed in (1, 2)]
    with pytest.raises(GeometryMismatch, match=r"fingerprint\.revision"):
        plan(layouts[0], BlockTable.of([0], 16), layouts[1], BlockTable.of([0], 16))


# -- what damage does -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", range(ModelConfig().layers))
def test_a_zeroed_layer_changes_the_tokens(filled: tuple[Memory, int], expected: list[int], layer: int) -> None:
    memory, first = filled
    memory.cache.layer(layer)[:] = 0
    assert memory.decode(first) != expected


@pytest.mark.parametrize("layer", range(ModelConfig().layers))
@pytest.mark.parametrize("where", ["beginning", "middle", "end"])
def test_flipped_signs_in_a_few_blocks_change_the_tokens(
    filled: tuple[Memory, int], expected: list[int], layer: int, where: str
) -> None:
    memory, first = filled
    full = memory.table.tokens // BLOCK_TOKENS
    begin = {"beginning": 0, "middle": full // 2, "end": full - 8}[where]
    memory.cache.layer(layer)[:, memory.table.blocks[begin : begin + 8]] *= -1
    assert memory.decode(first) != expected


def test_two_swapped_blocks_change_the_tokens(filled: tuple[Memory, int], expected: list[int]) -> None:
    memory, first = filled
    wrong = memory.table.blocks.copy()
    wrong[[3, 9]] = wrong[[9, 3]]
    assert MODEL.decode(first, memory.table.tokens, memory.cache, BlockTable.of(wrong, 1), STEPS) != expected


def test_another_first_token_or_prompt_changes_the_tokens(filled: tuple[Memory, int], expected: list[int]) -> None:
    memory, first = filled
    assert memory.decode((first + 1) % 256) != expected
    changed = b"1" + PROMPT[1:]
    assert run_undivided(changed, seed=SEED, steps=STEPS, block_tokens=BLOCK_TOKENS)[0] != expected


# -- the model itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [b"x", b"aaaaaaaaaaaaaaaaaaaaaaaa", PROMPT[:200], PROMPT, b"\0" * 900])
def test_decoding_does_not_get_stuck(prompt: bytes) -> None:
    tokens, _ = run_undivided(prompt, seed=SEED, steps=48, block_tokens=16)
    assert len(tokens) == 48
    assert len(set(tokens)) >= 16
    assert sum(a == b for a, b in pairwise(tokens)) <= 16


def test_prefill_and_decode_agree() -> None:
    """One more prompt token, or that token decoded: the same logits but for rounding."""
    tokens = tokenize(PROMPT[:300], 8000)
    long, short = Memory.made(len(tokens)), Memory.made(len(tokens))
    MODEL.prefill(tokens, long.cache, long.table)
    whole = MODEL._logits
    MODEL.prefill(tokens[:-1], short.cache, short.table)
    stepped = MODEL.step(tokens[-1], len(tokens) - 1, short.cache, short.table)
    np.testing.assert_allclose(stepped, whole, atol=1e-3)
    np.testing.assert_allclose(short.bytes.view(np.float32), long.bytes.view(np.float32), atol=1e-3)


def test_attention_looks_back_only() -> None:
    """A later token does not change the keys and values of an earlier one."""
    tokens = tokenize(PROMPT[:200], 8000)
    one, other = Memory.made(len(tokens)), Memory.made(len(tokens))
    MODEL.prefill(tokens, one.cache, one.table)
    MODEL.prefill([*tokens[:150], 7, *tokens[151:]], other.cache, other.table)
    for layer in range(MODEL.config.layers):
        for ours, theirs in zip(
            one.cache.read(layer, one.table, 201), other.cache.read(layer, other.table, 201), strict=True
        ):
            assert np.array_equal(ours[:150], theirs[:150])
            assert not np.array_equal(ours[150:], theirs[150:])


def test_a_layer_is_final_when_it_is_yielded() -> None:
    tokens = tokenize(PROMPT, 8000)
    memory = Memory.made(len(tokens))
    seen: list[np.ndarray] = []
    with pytest.raises(RuntimeError):
        TinyModel(seed=1).next_token()
    for layer in MODEL.prefill_layers(tokens, memory.cache, memory.table):
        assert layer == len(seen)
        seen.append(memory.cache.layer(layer).copy())
        assert all(not memory.cache.layer(later).any() for later in range(layer + 1, MODEL.config.layers))
    assert all(np.array_equal(memory.cache.layer(layer), copy) for layer, copy in enumerate(seen))


def test_only_the_blocks_of_the_table_are_written(filled: tuple[Memory, int]) -> None:
    memory, first = filled
    memory.decode(first)
    others = np.setdiff1d(np.arange(memory.cache.layout.blocks), memory.table.blocks)
    assert len(others) == 5
    for layer in range(MODEL.config.layers):
        assert not memory.cache.layer(layer)[:, others].any()
        assert memory.cache.layer(layer)[:, memory.table.blocks[:-2]].any(axis=(0, 2, 3, 4)).all()


def test_a_cache_in_several_regions_with_strides() -> None:
    geometry = MODEL.geometry(16)
    per_block = geometry.bytes_per_block // 2
    places = tuple(
        LayerPlacement(region=i % 2, offset=i * per_block, strides=(8 * 6 * per_block, 6 * per_block, 256, 128))
        for i in range(6)
    )
    layout = CacheLayout(geometry=geometry, blocks=8, placements=places)
    needed = layout.region_bytes()
    cache = PagedCache(layout, bytearray(needed[0]), np.zeros(needed[1], np.uint8))
    tokens = tokenize(PROMPT[:60], 8000)
    table = BlockTable.of([7, 0, 3, 2, 6], tokens=len(tokens))
    plain = Memory.made(len(tokens))
    first = MODEL.prefill(tokens, cache, table)
    assert first == MODEL.prefill(tokens, plain.cache, plain.table)
    assert MODEL.decode(first, len(tokens), cache, table, 10) == plain.decode(first, 10)


def wrong_start(cache: PagedCache) -> object:
    return MODEL.prefill([1, 2], cache, BlockTable.of([0], 2, first_token=16))


def too_many(cache: PagedCache) -> object:
    return MODEL.prefill([1] * 17, cache, BlockTable.of([0], 1))


def too_far(cache: PagedCache) -> object:
    return MODEL.decode(1, 15, cache, BlockTable.of([0], 15), 2)


def nothing(cache: PagedCache) -> object:
    return MODEL.prefill([], cache, BlockTable.of([0], 0))


@pytest.mark.parametrize("call", [wrong_start, too_many, too_far, nothing])
def test_what_does_not_fit_is_refused(call: Callable[[PagedCache], object]) -> None:
    layout, length = contiguous_layout(MODEL.geometry(16), 4)
    with pytest.raises(ValueError, match="table"):
        call(PagedCache(layout, bytearray(length)))


def test_tokenize() -> None:
    assert tokenize(b"ab", 8) == [BEGIN, 97, 98]
    assert tokenize(b"abcdef", 3) == [BEGIN, 97, 98]


def test_a_prompt_of_six_thousand_tokens_is_prefilled_in_seconds() -> None:
    """On one core. Measured 1.3 s; the limit leaves room for a neighbour on the same core."""
    script = (
        "import time; from tests.examples.test_tiny_model import *\n"
        "tokens = tokenize(PROMPT * 6, 6145); memory = Memory.made(len(tokens)); began = time.process_time()\n"
        "MODEL.prefill(tokens, memory.cache, memory.table); print(time.process_time() - began)"
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 3 * SLACK
