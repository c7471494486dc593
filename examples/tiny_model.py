"""A small decoder-only transformer in numpy; its paged KV cache lies in memory that the caller provides.

It knows nothing about transfers, as an inference engine would not. Its weights are drawn from a seed: what it says
means nothing, but every token depends on the whole cache. Three choices see to that, for else a random model soon
repeats one token: queries and keys are normalised and scores stretched, so that attention is neither flat nor stuck;
values are turned by their position, as keys are, so that what attention finds changes from step to step; and what it
finds is normalised, so that it does not fade with the length of the prompt.

The keys and values of a layer are final before that layer attends, so `TinyModel.prefill_layers` yields that early: it
can be on its way to another machine while the rest of the layer is still computed. Prefill and decode compute each
position the same way from the same bytes, wherever the blocks lie; a divided run therefore gives exactly the tokens of
an undivided one (with the same numpy and the same number of BLAS threads on both sides).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout needs no installation

from kvxfer.geometry import BlockTable, CacheLayout, Geometry, fingerprint_of
from kvxfer.planner import contiguous_layout

Floats = npt.NDArray[np.float32]

BEGIN = 256  # the one special token: stands before the prompt's bytes
QUERY_CHUNK = 128
KEY_TILE = 1024  # a multiple of QUERY_CHUNK; a tile of scores stays in the cache of one core
SCORE_GAIN = 4.0
PLACE_GAIN = 1.5
_BACKWARDS = np.array([1, -1], np.float32)[:, None, None, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes. ``context_max``: positions of prompt and generated tokens together."""

    layers: int = 6
    width: int = 256
    query_heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    hidden: int = 512
    context_max: int = 8192


def tokenize(data: bytes, tokens_max: int) -> list[int]:
    """`BEGIN` and then the bytes, at most ``tokens_max`` tokens in all."""
    return [BEGIN, *data[: tokens_max - 1]]


class PagedCache:
    """Views of a cache's layers in memory that belongs to somebody else; nothing is copied or kept.

    ``buffers``: one per region that the layout's placements name, each a bytes-like object or array of uint8.
    """

    def __init__(self, layout: CacheLayout, *buffers: Any) -> None:
        geometry = layout.geometry
        self.layout = layout
        shape = (*geometry.extents(layout.blocks), geometry.head_size)
        self._layers = [
            np.ndarray(
                shape,
                np.dtype(geometry.dtype),
                buffer=buffers[placement.region],
                offset=placement.offset,
                strides=(*layout.strides(layer), geometry.itemsize),
            )
            for layer, placement in enumerate(layout.placements)
        ]

    def layer(self, index: int) -> npt.NDArray[Any]:
        """Shape (parts, blocks, block tokens, heads, head size), whatever the order in memory."""
        return self._layers[index]

    def write(self, layer: int, table: BlockTable, first: int, keys: Floats, values: Floats) -> None:
        """Store keys and values, shape (tokens, heads, head size), at the positions from ``first`` on."""
        size = self.layout.geometry.block_tokens
        index, slot = np.divmod(np.arange(first, first + len(keys)) - table.first_token + table.slot(size), size)
        for part, rows in enumerate((keys, values)):
            self._layers[layer][part, table.blocks[index], slot] = rows

    def read(self, layer: int, table: BlockTable, tokens: int) -> tuple[Floats, Floats]:
        """Keys and values of the first ``tokens`` positions, each of shape (tokens, heads, head size)."""
        used = table.blocks[: -(-tokens // self.layout.geometry.block_tokens)]
        keys, values = (
            self._layers[layer][part, used].reshape(-1, *self._layers[layer].shape[3:])[:tokens] for part in (0, 1)
        )
        return keys, values


class TinyModel:
    """Rotary positions, grouped queries, RMS normalisation, SwiGLU; float32, weights from ``seed``."""

    def __init__(self, seed: int = 0, config: ModelConfig | None = None) -> None:
        self.seed = seed
        self.config = config = config or ModelConfig()
        self._rng = np.random.default_rng(seed)
        queries, keys = config.query_heads * config.head_size, config.kv_heads * config.head_size
        self._embedding = self._matrix(BEGIN + 1, config.width) * np.float32(np.sqrt(BEGIN + 1))
        self._blocks = [
            {
                "qkv": self._matrix(config.width, queries + 2 * keys),
                "out": self._matrix(queries, config.width),
                "gate": self._matrix(config.width, 2 * config.hidden),
                "down": self._matrix(config.hidden, config.width),
            }
            for _ in range(config.layers)
        ]
        self._unembedding = self._matrix(config.width, 256)
        # Parts of the scores that depend on the place alone: they tell when blocks are read in the wrong order.
        places = (config.kv_heads, config.context_max)
        self._bias = self._rng.standard_normal(places, np.float32) * np.float32(PLACE_GAIN)
        self._rotary = _rotary_table(config.context_max, config.head_size)
        self._logits: Floats | None = None

    def _matrix(self, rows: int, columns: int) -> Floats:
        """Scaled so that inputs of unit size give outputs of unit size."""
        return self._rng.standard_normal((rows, columns), np.float32) * np.float32(1 / np.sqrt(rows))

    def geometry(self, block_tokens: int, *, layout: str = "PBNHD") -> Geometry:
        """What kvxfer must know about the cache. The fingerprint tells models of another seed or size apart."""
        config = self.config
        sizes = f"{config.width}x{config.hidden}x{config.query_heads}"
        return Geometry(
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_size=config.head_size,
            block_tokens=block_tokens,
            dtype="float32",
            layout=layout,
            fingerprint=fingerprint_of(model="tiny", revision=str(self.seed), sizes=sizes),
        )

    # -- prefill ------------------------------------------------------------------------------------------

    def prefill_layers(self, tokens: Sequence[int], cache: PagedCache, table: BlockTable) -> Iterator[int]:
        """Fill the cache for all of ``tokens``; yields a layer's index as soon as its keys and values are final.

        When the iterator has ended, `next_token` is known. Raises ValueError when they do not fit.
        """
        self._require_room(len(tokens), cache, table)
        self._logits = None
        hidden = self._embedding[np.asarray(tokens)]
        for layer in range(self.config.layers):
            last = layer == self.config.layers - 1
            queries, keys, values = self._project(layer, hidden, 0)
            cache.write(layer, table, 0, keys, values)
            yield layer
            if last:  # nothing but the next token needs the rest of the last layer
                queries, hidden = queries[-1:], hidden[-1:]
            first = len(tokens) - len(queries)
            for start in range(0, len(queries), QUERY_CHUNK):
                chunk = slice(start, start + QUERY_CHUNK)
                mixed = self._attend(queries[chunk], keys, values, first + start)
                hidden[chunk] = self._finish(layer, hidden[chunk], mixed)
        self._logits = self._unembed(hidden)

    def prefill(self, tokens: Sequence[int], cache: PagedCache, table: BlockTable) -> int:
        """All layers at once; returns the next token."""
        for _ in self.prefill_layers(tokens, cache, table):
            pass
        return self.next_token()

    def next_token(self) -> int:
        """The token that follows the last prefill."""
        if self._logits is None:
            raise RuntimeError("next_token is known once prefill_layers has run to its end")
        return int(self._logits.argmax())

    # -- decode -------------------------------------------------------------------------------------------

    def decode(self, first: int, position: int, cache: PagedCache, table: BlockTable, steps: int) -> list[int]:
        """The ``steps`` tokens that follow token ``first`` at ``position``, given the cache of all positions before it.

        Each step stores its own keys and values, so the table's blocks must hold ``position + steps`` positions; its
        ``tokens`` may be fewer.
        """
        self._require_room(position + steps, cache, table)
        token, found = first, []
        for place in range(position, position + steps):
            token = int(self.step(token, place, cache, table).argmax())
            found.append(token)
        return found

    def step(self, token: int, position: int, cache: PagedCache, table: BlockTable) -> Floats:
        """Logits, shape (256,), for what follows ``token`` at ``position``. Stores that position's keys and values."""
        hidden = self._embedding[[token]]
        for layer in range(self.config.layers):
            queries, keys, values = self._project(layer, hidden, position)
            cache.write(layer, table, position, keys, values)
            keys, values = cache.read(layer, table, position + 1)
            hidden = self._finish(layer, hidden, self._attend(queries, keys, values, position))
        return self._unembed(hidden)

    # -- one layer ----------------------------------------------------------------------------------------

    def _project(self, layer: int, hidden: Floats, first: int) -> tuple[Floats, Floats, Floats]:
        """Queries, keys and values of positions from ``first`` on, each of shape (tokens, heads, head size)."""
        config = self.config
        rows = (_normalised(hidden) @ self._blocks[layer]["qkv"]).reshape(len(hidden), -1, config.head_size)
        heads = config.query_heads + config.kv_heads
        rows[:, :heads] = _normalised(rows[:, :heads])
        turned = _rotated(rows, self._rotary[:, first : first + len(hidden)])
        return turned[:, : config.query_heads], turned[:, config.query_heads : heads], turned[:, heads:]

    def _attend(self, queries: Floats, keys: Floats, values: Floats, first: int) -> Floats:
        """Causal attention of queries at the positions from ``first`` on; the same shape as ``queries``.

        Scores of normalised vectors are bounded, so the exponentials need no maximum, and tiles of keys just add up.
        """
        count, size = len(queries), self.config.head_size
        group = self.config.query_heads // self.config.kv_heads
        scale = np.float32(SCORE_GAIN / np.sqrt(size))
        mixed = np.empty_like(queries)
        causal = np.tri(count, dtype=np.float32)
        for head in range(self.config.kv_heads):
            mine = slice(head * group, (head + 1) * group)
            rows = queries[:, mine].transpose(1, 0, 2).reshape(group * count, size) * scale
            total, weight = np.zeros((group * count, size), np.float32), np.zeros((group * count, 1), np.float32)
            for start in range(0, first + count, KEY_TILE):
                stop = min(start + KEY_TILE, first + count)
                scores = rows @ keys[start:stop, head].T
                scores += self._bias[head, start:stop]
                np.exp(scores, out=scores)
                if stop > first:  # the tile reaches the queries' own positions
                    border = max(first, start)
                    later = scores.reshape(group, count, stop - start)[:, :, border - start :]
                    later *= causal[:, border - first : stop - first]
                total += scores @ values[start:stop, head]
                weight += scores.sum(axis=1, keepdims=True)
            mixed[:, mine] = (total / weight).reshape(group, count, size).transpose(1, 0, 2)
        # The values were turned by their positions; turned back by the query's, only the distance is left.
        return _rotated(mixed, self._rotary[:, first : first + count] * _BACKWARDS)

    def _finish(self, layer: int, hidden: Floats, mixed: Floats) -> Floats:
        weights = self._blocks[layer]
        hidden = hidden + _normalised(mixed.reshape(len(mixed), -1)) @ weights["out"]
        gate, up = np.split(_normalised(hidden) @ weights["gate"], 2, axis=1)
        return hidden + _normalised(gate / (1 + np.exp(-gate)) * up) @ weights["down"]

    def _unembed(self, hidden: Floats) -> Floats:
        logits: Floats = (_normalised(hidden[-1:]) @ self._unembedding)[0]
        return logits

    def _require_room(self, positions: int, cache: PagedCache, table: BlockTable) -> None:
        room = len(table.blocks) * cache.layout.geometry.block_tokens
        if table.first_token:
            raise ValueError("the table must begin at position 0")
        if not 0 < positions <= min(room, self.config.context_max):
            raise ValueError(f"{positions} positions: the table holds {room}, the model {self.config.context_max}")


def _normalised(rows: Floats) -> Floats:
    """Root mean square 1 along the last axis."""
    squares = np.einsum("...i,...i->...", rows, rows)[..., None]
    scaled: Floats = rows / np.sqrt(squares / np.float32(rows.shape[-1]) + np.float32(1e-6))
    return scaled


def _rotary_table(positions: int, size: int) -> Floats:
    """Cosines and sines, shape (2, positions, 1, size / 2)."""
    speeds = 10000.0 ** (-np.arange(0, size, 2) / size)
    angles = np.arange(positions)[:, None] * speeds
    return np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)[:, :, None, :]


def _rotated(rows: Floats, table: Floats) -> Floats:
    """Each pair of dimensions turned by an angle that grows with the position."""
    left, right = np.split(rows, 2, axis=-1)
    return np.concatenate([left * table[0] - right * table[1], left * table[1] + right * table[0]], axis=-1)


def run_undivided(data: bytes, *, seed: int, steps: int, block_tokens: int) -> tuple[list[int], int]:
    """Prefill and decode in one go, in own memory: ``steps`` tokens after the first one, and the prompt's length."""
    model = TinyModel(seed=seed)
    tokens = tokenize(data, model.config.context_max - steps)
    blocks = -(-(len(tokens) + steps) // block_tokens)
    layout, length = contiguous_layout(model.geometry(block_tokens), blocks)
    cache = PagedCache(layout, np.zeros(length, np.uint8))
    table = BlockTable.of(range(blocks), tokens=len(tokens))
    first = model.prefill(tokens, cache, table)
    return model.decode(first, len(tokens), cache, table, steps), len(tokens)


if __name__ == "__main__":
    prompt = Path(sys.argv[1] if len(sys.argv) > 1 else __file__).read_bytes()
    print(run_undivided(prompt, seed=7, steps=48, block_tokens=16))
