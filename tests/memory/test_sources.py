"""Borrowing memory: what is accepted, what is refused, and that nothing is copied."""

from __future__ import annotations

import array
import ctypes
import mmap
from dataclasses import dataclass

import numpy as np
import pytest

from kvxfer.errors import InvalidLength, RegistrationError, UsageError
from kvxfer.memory.sources import at_address, base_address_of, borrow
from kvxfer.native.types import MemoryKind


@pytest.mark.parametrize(
    "source",
    [bytearray(100), array.array("d", [0.0] * 9), memoryview(bytearray(64))[8:], mmap.mmap(-1, 4096), np.zeros((3, 5))],
    ids=lambda source: type(source).__name__,
)
def test_whatever_has_a_buffer(source: object) -> None:
    found = borrow(source)
    view = np.frombuffer(memoryview(source).cast("B"), dtype=np.uint8)  # type: ignore[arg-type]
    assert (found.address, found.length, found.read_only) == (view.ctypes.data, view.nbytes, False)


def test_read_only_memory_is_known_as_such() -> None:
    assert borrow(b"abc").read_only
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    assert borrow(frozen).read_only


class Tensor:
    """Looks like a torch tensor, as far as registration looks."""

    def __init__(self, values: np.ndarray, device: object = "cpu") -> None:
        self.values, self.device = values, device

    def data_ptr(self) -> int:
        return self.values.ctypes.data

    def numel(self) -> int:
        return self.values.size

    def element_size(self) -> int:
        return self.values.itemsize

    def is_contiguous(self) -> bool:
        return bool(self.values.flags.c_contiguous)


def test_tensors_by_their_data_pointer() -> None:
    values = np.zeros((4, 4), dtype=np.float32)
    found = borrow(Tensor(values))
    assert (found.address, found.length) == (values.ctypes.data, 64)
    with pytest.raises(RegistrationError, match="cuda:0"):
        borrow(Tensor(values, "cuda:0"))
    with pytest.raises(UsageError, match="contiguous"):
        borrow(Tensor(values[:, ::2]))
    with pytest.raises(InvalidLength):
        borrow(Tensor(values[:0]))


class Producer:
    """Only DLPack."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __dlpack__(self, **options: object) -> object:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.values.__dlpack_device__()


def test_dlpack_producers() -> None:
    values = np.arange(10, dtype=np.float32)
    assert borrow(Producer(values)).address == values.ctypes.data


@pytest.mark.parametrize("bad", [object(), 5, "text", None])
def test_what_has_no_memory_is_refused(bad: object) -> None:
    with pytest.raises(UsageError, match="cannot register"):
        borrow(bad)


class Pair(ctypes.Structure):
    """A structure with an address in it."""

    _fields_ = (("count", ctypes.c_int), ("at", ctypes.c_void_p))


class Numbers(ctypes.Structure):
    """A structure of numbers, whose names look like formats."""

    _fields_ = (("O", ctypes.c_int), ("P", ctypes.c_double), ("z", ctypes.c_uint8 * 3))


NOT_PLAIN: dict[str, object] = {
    "objects": np.array([object(), "x", [1], {}], dtype=object),
    "no objects yet": np.empty(4, dtype=object),
    "a field of objects": np.zeros(4, dtype=[("a", "i4"), ("o", "O")]),
    "a field of a field": np.zeros(4, dtype=[("a", [("b", "u8"), ("o", "O", (2,))])]),
    "a view of objects": np.array([[object()] * 3] * 3, dtype=object)[1],
    "a buffer of objects": memoryview(np.array([object()], dtype=object)),
    "a buffer of a structure": memoryview(np.zeros(4, dtype=[("a", "i4"), ("o", "O")])),
    "objects of ctypes": (ctypes.py_object * 4)(),
    "addresses": (ctypes.c_void_p * 4)(),
    "pointers": (ctypes.POINTER(ctypes.c_int) * 4)(),
    "functions": (ctypes.CFUNCTYPE(ctypes.c_int) * 2)(),
    "strings elsewhere": (ctypes.c_char_p * 2)(),
    "wide strings elsewhere": (ctypes.c_wchar_p * 2)(),
    "a structure with an address": (Pair * 2)(),
    **({"strings of any length": np.array(["a", "b"], dtype="T")} if hasattr(np.dtypes, "StringDType") else {}),
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_objects_and_addresses_are_not_bytes(name: str) -> None:
    with pytest.raises(UsageError, match=r"cannot register .* holds objects or addresses") as refused:
        borrow(NOT_PLAIN[name])
    assert refused.value.hint is not None


@pytest.mark.parametrize(
    "plain",
    [
        np.zeros(4, dtype=[("O", "i4"), ("P", "f8", (2,))]),
        memoryview(np.zeros(4, dtype=[("O", "i4"), ("P", "f8", (2,))])),
        (Numbers * 3)(),
        np.zeros(3, dtype="S7"),
        np.zeros(3, dtype="U7"),
        np.zeros(3, dtype="V16"),
        np.zeros(3, dtype="M8[s]"),
        np.zeros(3, dtype=np.complex64),
        np.zeros(3, dtype=bool),
        np.zeros(3, dtype=">f4"),
        np.zeros(3, dtype=np.float16),
    ],
    ids=str,
)
def test_whatever_is_plain_may_be_registered(plain: object) -> None:
    wanted = plain.nbytes if isinstance(plain, np.ndarray) else memoryview(plain).nbytes  # type: ignore[arg-type]
    assert borrow(plain).length == wanted


@pytest.mark.parametrize("empty", [b"", np.zeros(0), memoryview(b"")])
def test_empty_memory_is_refused(empty: object) -> None:
    with pytest.raises(InvalidLength):
        borrow(empty)


def test_gaps_are_refused() -> None:
    with pytest.raises(UsageError, match="contiguous"):
        borrow(np.zeros((4, 4))[:, ::2])
    with pytest.raises(UsageError, match="contiguous"):
        borrow(memoryview(bytearray(10))[::2])


@dataclass(frozen=True)
class Device:
    """Looks like torch.device."""

    type: str
    index: int | None


@pytest.mark.parametrize("device", ["npu:3", Device("npu", 3)], ids=["text", "object"])
def test_tensors_of_a_device_by_address_only(device: object) -> None:
    values = np.zeros((4, 4), dtype=np.float32)
    tensor = Tensor(values, device)
    found = borrow(tensor)
    assert (found.kind, found.device, found.array) == (MemoryKind.HBM, 3, None)
    assert (found.address, found.length) == (values.ctypes.data, 64)
    assert found.owner is tensor
    assert borrow(tensor, device=3) == found
    with pytest.raises(UsageError, match="another device"):
        borrow(tensor, device=2)


def test_a_device_without_a_number_is_refused() -> None:
    with pytest.raises(UsageError, match="on which device"):
        borrow(Tensor(np.zeros(4), Device("npu", None)))


def test_host_memory_for_a_device_is_pinned_memory() -> None:
    found = borrow(np.zeros(4), device=1)
    assert (found.kind, found.device) == (MemoryKind.PINNED, 1)
    assert found.array is not None


def test_bare_addresses() -> None:
    values = np.arange(16, dtype=np.uint8)
    found = at_address(values.ctypes.data, 16, MemoryKind.DRAM, None)
    assert found.array is not None
    assert found.array.tolist() == list(range(16))
    on_device = at_address(1 << 40, 1 << 21, MemoryKind.HBM, 0)
    assert (on_device.kind, on_device.device, on_device.array) == (MemoryKind.HBM, 0, None)


@pytest.mark.parametrize(
    ("address", "length", "error"),
    [
        *((address, 1, UsageError) for address in (0, None, 1.5, True, 1 << 64)),
        *((4096, length, InvalidLength) for length in (0, None, (1 << 64) - 4096)),
    ],
)
def test_impossible_addresses(address: object, length: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        at_address(address, length, MemoryKind.HBM, 0)


class Storage:
    """An untyped storage of torch, as far as it is used."""

    device = "cpu"

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def data_ptr(self) -> int:
        return int(self._array.ctypes.data)

    def element_size(self) -> int:
        return 1

    def nbytes(self) -> int:
        return int(self._array.nbytes)


def test_storages_by_all_their_bytes() -> None:
    array = np.arange(64, dtype=np.uint8)
    found = borrow(Storage(array))
    assert (found.address, found.length) == (array.ctypes.data, 64)
    assert base_address_of(Storage(array)) == (("host", array.ctypes.data), 64)
    with pytest.raises(InvalidLength):
        borrow(Storage(array[:0]))
