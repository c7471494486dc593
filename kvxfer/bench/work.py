"""The workloads as numbers: how large, how many, which blocks. Both processes compute the same blocks from a seed."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvxfer.errors import UsageError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PIECE_BYTES = 8 * MIB  # a checksum of one large block lets other threads run between pieces
Segments = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Everything that can be smaller in a quick run. Bytes, counts, seconds."""

    large_bytes: int = 256 * MIB
    blocks: int = 4096
    block_bytes: int = 32 * KIB
    small_blocks: int = 65536
    small_block_bytes: int = 4 * KIB
    layers: int = 80
    layer_bytes: int = MIB
    layers_at_once: int = 8
    streams: int = 32
    stream_bytes: int = 4 * MIB
    stream_repeats: int = 3
    samples: int = 600
    repeats: int = 3
    setup_bytes: int = GIB
    peers: int = 64
    idle_s: float = 1.0
    scale_bytes: int = 64 * MIB
    descriptors_max: int = 1 << 20

    @property
    def region_bytes(self) -> int:
        """One region holds every workload."""
        return max(
            self.large_bytes,
            self.blocks * self.block_bytes,
            self.small_blocks * self.small_block_bytes,
            self.layers * self.layer_bytes,
            self.streams * self.stream_bytes,
            self.scale_bytes,
        )

    def memory_bytes(self, transports: int) -> int:
        """What a whole run needs: per transport two regions on each side, the references' two, and the set-up's."""
        return (4 * transports + 2) * self.region_bytes + 2 * self.setup_bytes + 512 * MIB


FULL = Sizes()
QUICK = Sizes(
    large_bytes=64 * MIB,
    blocks=1024,
    small_blocks=8192,
    layers=20,
    streams=8,
    samples=200,
    setup_bytes=64 * MIB,
    peers=4,
    idle_s=0.5,
    scale_bytes=16 * MIB,
    descriptors_max=1 << 16,
)
TINY = Sizes(
    large_bytes=2 * MIB,
    blocks=32,
    small_blocks=256,
    layers=4,
    layer_bytes=64 * KIB,
    streams=2,
    stream_bytes=256 * KIB,
    stream_repeats=2,
    samples=20,
    repeats=1,
    setup_bytes=4 * MIB,
    peers=2,
    idle_s=0.05,
    scale_bytes=MIB,
    descriptors_max=256,
)
SIZES = {"full": FULL, "quick": QUICK, "tiny": TINY}


@dataclass(frozen=True, slots=True)
class Layout:
    """Which blocks a request moves: ``count`` blocks of ``block_bytes``; scattered differently on the two sides when a
    pool of bytes to scatter over is given.
    """

    count: int
    block_bytes: int
    pool_bytes: int = 0
    first: int = 0

    def segments(self) -> Segments:
        """Rows [local offset, remote offset, length]; the same in every process."""
        if not self.pool_bytes:
            offsets = self.first + np.arange(self.count, dtype=np.uint64) * np.uint64(self.block_bytes)
            columns = [offsets, offsets]
        else:
            pool = self.pool_bytes // self.block_bytes
            if pool < self.count:
                raise UsageError("the blocks do not fit into the pool", blocks=self.count, pool=pool)
            columns = [
                np.random.default_rng(seed).permutation(pool)[: self.count].astype(np.uint64)
                * np.uint64(self.block_bytes)
                for seed in (1, 2)
            ]
        lengths = np.full(self.count, self.block_bytes, np.uint64)
        return np.ascontiguousarray(np.stack([*columns, lengths], axis=1))

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole request."""
        return self.count * self.block_bytes

    @property
    def reach_bytes(self) -> int:
        """All of its blocks lie below this offset."""
        return self.pool_bytes or self.first + self.total_bytes


def fill(array: npt.NDArray[np.uint8], seed: int) -> None:
    """Random bytes (``len(array)`` a multiple of 8), at memory speed: random pieces, each mixed with its own number."""
    generator = np.random.default_rng(seed)
    words = array.view(np.uint64)
    step = min(PIECE_BYTES // 8, len(words))
    piece = generator.integers(0, 1 << 64, step, np.uint64)
    for begin in range(0, len(words), step):
        part = words[begin : begin + step]
        np.bitwise_xor(piece[: len(part)], generator.integers(0, 1 << 64, 1, np.uint64), out=part)


def checksum(array: npt.NDArray[np.uint8], layout: Layout, *, remote: bool) -> int:
    """CRC-32 over the blocks of one side in the order of the request: equal on both sides when each block is in its
    place.
    """
    view = array.data
    found = 0
    for offset in layout.segments()[:, 1 if remote else 0].tolist():
        for begin in range(offset, offset + layout.block_bytes, PIECE_BYTES):
            found = zlib.crc32(view[begin : min(begin + PIECE_BYTES, offset + layout.block_bytes)], found)
    return found
