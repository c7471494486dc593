"""The example for vllm-ascend: it runs over host memory, and refuses what a card would refuse."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.conftest import slack

pytestmark = pytest.mark.once
SCRIPT = Path(__file__).resolve().parent.parent.parent / "examples" / "vllm_ascend.py"
MIB = 1 << 20


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_ascend_example", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_it_runs_and_every_byte_is_right() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVXFER_")}
    command = [sys.executable, "-W", "error", str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 * slack(), env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "2 shapes, 6 tensors: all bytes are right\n"


def part(example: ModuleType, address: int, length: int = 4096, **more: Any) -> Any:
    return example.Part(
        **({"name": "k", "shape": (1, 16, 1, 128), "dtype": "float16"} | more), address=address, length=length
    )


def test_an_allocation_is_registered_once(example: ModuleType) -> None:
    segments = [example.Segment(address=at * MIB, length=2 * MIB, device=0) for at in (2, 4, 8)]
    parts = [part(example, 2 * MIB), part(example, 2 * MIB + 8192), part(example, 8 * MIB)]
    assert example.needed_segments(parts, segments) == [segments[0], segments[2]]


@pytest.mark.parametrize(
    ("segment", "why"),
    [
        ({"address": 2 * MIB, "length": 2 * MIB, "device": 0}, "no allocation"),
        ({"address": 8 * MIB - 512, "length": 2 * MIB, "device": 0}, "not aligned"),
        ({"address": 8 * MIB, "length": 2 * MIB - 512, "device": 0}, "not aligned"),
    ],
)
def test_what_a_card_would_refuse(example: ModuleType, segment: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        example.needed_segments([part(example, 8 * MIB)], [example.Segment(**segment)])


def test_host_memory_needs_no_alignment(example: ModuleType) -> None:
    segment = example.Segment(address=8 * MIB - 512, length=MIB)
    assert example.needed_segments([part(example, 8 * MIB)], [segment]) == [segment]


def test_shapes_become_caches_of_their_own(example: ModuleType) -> None:
    segment = example.Segment(address=0x1000, length=MIB)
    parts = [
        part(example, 0x1000),
        part(example, 0x2000, 2048, name="v", shape=(1, 16, 1, 64)),
        part(example, 0x3000),
    ]
    wide, narrow = example.layouts_of(parts, [segment], packing="nz")
    assert (wide.geometry.layers, wide.geometry.head_size, narrow.geometry.head_size) == (2, 128, 64)
    assert [placement.offset for placement in wide.placements] == [0, 0x2000]
    assert wide.geometry.packing == "nz"


def test_other_tensors_are_refused(example: ModuleType) -> None:
    flat = example.HostTensor(np.zeros((4, 4)))
    holed = example.HostTensor(np.zeros((4, 4, 4, 8))[..., ::2])
    for tensor in (flat, holed):
        with pytest.raises(ValueError, match=r"layer\[0\]: a contiguous tensor"):
            example.parts_of({"layer": tensor})
