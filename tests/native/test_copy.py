"""Copies at every alignment around every threshold, and CRC-32C against published values and a plain version."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.native._shim import ffi, lib
from tests.native.sources import NATIVE, named

HERE = Path(__file__).parent
ALWAYS, NEVER = 0, 2**64 - 1
GUARD = 256


def copied(source: bytes, target_shift: int, source_shift: int, nt_bytes_min: int) -> None:
    """Copy between unaligned places and look at the bytes before and after the target too."""
    length = len(source)
    room = np.zeros(length + 2 * GUARD + 64, dtype=np.uint8)
    room[source_shift : source_shift + length] = np.frombuffer(source, dtype=np.uint8)
    target = np.full(length + 2 * GUARD + 64, 0xEE, dtype=np.uint8)
    at = GUARD + target_shift
    lib.kvx_copy(
        ffi.from_buffer("char[]", target) + at, ffi.from_buffer("char[]", room) + source_shift, length, nt_bytes_min
    )
    assert target[at : at + length].tobytes() == source
    assert (target[:at] == 0xEE).all()
    assert (target[at + length :] == 0xEE).all()


@pytest.mark.parametrize("nt_bytes_min", [ALWAYS, NEVER, 4096])
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 127, 128, 4095, 4096, 32767, 32768, 32769, 100_003])
def test_copy_at_every_alignment(length: int, nt_bytes_min: int) -> None:
    source = random.Random(length).randbytes(length)
    for target_shift, source_shift in [(0, 0), (1, 0), (0, 1), (63, 17), (32, 32), (16, 48), (7, 9)]:
        copied(source, target_shift, source_shift, nt_bytes_min)


@given(st.integers(0, 200_000), st.integers(0, 63), st.integers(0, 63), st.randoms())
@settings(max_examples=60, deadline=None)
def test_non_temporal_copy(length: int, target_shift: int, source_shift: int, rng: random.Random) -> None:
    copied(rng.randbytes(length), target_shift, source_shift, ALWAYS)


def plain_crc32c(data: bytes, seed: int = 0) -> int:
    crc = seed ^ 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "expected"),
    [  # RFC 3720, B.4, and the check value of the catalogue of CRC algorithms
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_crc32c_published_values(data: bytes, expected: int) -> None:
    assert lib.kvx_crc32c(0, data, len(data)) == expected


@pytest.mark.parametrize("length", [1, 7, 8, 3071, 3072, 3073, 6144, 10_007])
def test_crc32c_across_its_lanes(length: int) -> None:
    data = random.Random(length).randbytes(length)
    assert lib.kvx_crc32c(0, data, length) == plain_crc32c(data)


@given(st.binary(max_size=300), st.binary(max_size=300))
@settings(max_examples=50, deadline=None)
def test_crc32c_goes_on_from_a_seed(first: bytes, second: bytes) -> None:
    together = lib.kvx_crc32c(0, first + second, len(first) + len(second))
    assert lib.kvx_crc32c(lib.kvx_crc32c(0, first, len(first)), second, len(second)) == together


def test_every_kernel_of_this_cpu(tmp_path: Path) -> None:
    """The program that `make check-aarch64` runs in an emulator: also kernels that this CPU has and does not choose."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or "cc"
    sources = [HERE / "aarch64" / "check.c", named("auth.c"), named("stream.c")]
    flags = ["-std=gnu11", "-O2", "-pthread", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE}"]
    subprocess.run([compiler, *flags, "-o", str(tmp_path / "check"), *map(str, sources)], check=True)
    done = subprocess.run([str(tmp_path / "check")], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 2000
