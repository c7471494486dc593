"""What counts as memory: numpy arrays, anything with the buffer protocol, DLPack producers, torch tensors on the CPU or
on an accelerator, and bare addresses.

`borrow` finds address and length of the bytes without copying them and returns an object that keeps them alive. Only
contiguous memory qualifies: a gap inside a registration would be reachable by peers although it belongs to somebody
else. And only plain values: peers write bytes, and Python objects and addresses that are overwritten with bytes end the
process, or worse.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.descriptors import U64_MAX
from kvxfer.errors import InvalidLength, RegistrationError, UsageError
from kvxfer.native.types import MemoryKind

DEVICE_TYPE = "npu"  # of torch_npu's tensors
PLAIN_KINDS = "?biufcmMSUV"  # of numpy's types: values that are nothing but their bytes
# Of the buffer protocol (PEP 3118, and what ctypes says): an object, an address, a pointer to something, a function, a
# string somewhere else. Names of fields stand between colons.
FIELD_NAME = re.compile(r":[^:]*:")
ELSEWHERE = re.compile(r"[OPZz&]|X\{")


@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowedMemory:
    """Bytes of somebody else: address, length, the same as an array (shape (length,); None: not for the CPU), and who
    keeps them alive. ``device`` is set when an accelerator's driver has to be asked about them.
    """

    address: int
    length: int
    read_only: bool
    array: npt.NDArray[np.uint8] | None
    owner: object
    kind: MemoryKind = MemoryKind.DRAM
    device: int | None = None


def borrow(source: Any, *, device: int | None = None) -> BorrowedMemory:
    """The memory behind ``source``; raises `UsageError` when it cannot be reached, and says what was given.

    With a ``device``: memory on it, or host memory that its driver pinned.
    """
    found = _borrow(source)
    if device is None or found.device == device:
        return found
    if found.device is not None:
        raise UsageError("this object is on another device", device=device, found=found.device)
    return replace(found, kind=MemoryKind.PINNED, device=device)


def base_address_of(source: Any) -> tuple[tuple[object, int], int]:
    """Where the first byte of ``source`` is (address space, address), and how many bytes there are to its last one.

    Of a tensor, a numpy array, or what `borrow` takes; the gaps of what is not contiguous count. Raises `UsageError`
    and `InvalidLength`.
    """
    space: object = "host"
    if isinstance(source, np.ndarray):
        shape, steps, size, address = source.shape, source.strides, source.itemsize, int(source.ctypes.data)
    elif hasattr(source, "data_ptr") and hasattr(source, "element_size") and hasattr(source, "stride"):
        kind, number = _device_of(source)
        size, address, shape = int(source.element_size()), int(source.data_ptr()), tuple(map(int, source.shape))
        steps, space = tuple(int(step) * size for step in source.stride()), "host" if kind == "cpu" else number
    else:
        found = borrow(source)
        return (("host" if found.kind is not MemoryKind.HBM else found.device), found.address), found.length
    if 0 in shape:
        raise InvalidLength("an empty view lies nowhere", length=0)
    reaches = [(extent - 1) * step for extent, step in zip(shape, steps, strict=True)]
    return (space, address + sum(min(reach, 0) for reach in reaches)), size + sum(map(abs, reaches))


def at_address(address: object, length: object, kind: MemoryKind, device: int | None) -> BorrowedMemory:
    """``length`` bytes from ``address`` on, which the caller keeps alive. Raises `UsageError` and `InvalidLength`."""
    for name, value in (("address", address), ("length", length)):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= U64_MAX:
            what = InvalidLength if name == "length" else UsageError
            raise what(f"{name} must be a positive integer", field=name, value=repr(value)[:40])
    assert isinstance(address, int)
    assert isinstance(length, int)
    if length > U64_MAX - address:
        raise InvalidLength("the memory ends behind the last address", address=hex(address), length=length)
    if kind is MemoryKind.HBM:
        return BorrowedMemory(
            address=address, length=length, read_only=False, array=None, owner=None, kind=kind, device=device
        )
    return replace(_borrowed(address, length, False, None), kind=kind, device=device)


def _borrow(source: Any) -> BorrowedMemory:
    if isinstance(source, np.ndarray):
        return _from_array(source, source)
    if hasattr(source, "data_ptr") and hasattr(source, "element_size"):
        return _from_tensor(source)
    if hasattr(source, "__dlpack__"):
        return _from_dlpack(source)
    try:
        view = memoryview(source)
    except TypeError as wrong:
        raise UsageError(
            f"cannot register a {type(source).__name__}",
            hint="pass a numpy array, a torch tensor, or anything with the buffer protocol or DLPack",
        ) from wrong
    if ELSEWHERE.search(FIELD_NAME.sub("", view.format)):
        raise _not_plain(f"a buffer of format {view.format!r}")
    if not view.contiguous:
        raise UsageError("cannot register memory that is not contiguous", hint="register the storage it is a view of")
    if view.nbytes == 0:
        raise InvalidLength("cannot register an empty buffer", length=0)
    return _from_array(np.frombuffer(view, dtype=np.uint8), view)


def _not_plain(what: str) -> UsageError:
    return UsageError(
        f"cannot register {what[:200]}: it holds objects or addresses, which peers would overwrite with bytes",
        hint="register memory of plain values, for example an array of numbers",
    )


def _from_array(array: np.ndarray[Any, Any], owner: object) -> BorrowedMemory:
    if array.dtype.hasobject or array.dtype.kind not in PLAIN_KINDS:
        raise _not_plain(f"an array of {array.dtype}")
    if array.nbytes == 0:
        raise InvalidLength("cannot register an empty array", length=0)
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise UsageError("cannot register an array that is not contiguous", hint="register the array it is a view of")
    return _borrowed(_address_of(array), array.nbytes, not array.flags.writeable, owner)


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Memory at an address as numpy takes it. An array of it, or a part of one, holds this object, and so the owner."""

    __array_interface__: dict[str, Any]
    owner: object


def _address_of(array: np.ndarray[Any, Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _borrowed(address: int, length: int, read_only: bool, owner: object) -> BorrowedMemory:
    described = {"data": (address, read_only), "shape": (length,), "typestr": "|u1", "version": 3}
    view = np.asarray(_Bytes(described, owner))
    return BorrowedMemory(address=address, length=length, read_only=read_only, array=view, owner=owner)


def _from_tensor(tensor: Any) -> BorrowedMemory:
    kind, number = _device_of(tensor)
    if kind not in ("cpu", DEVICE_TYPE):
        raise RegistrationError(
            f"no transport here reaches memory of device {kind}:{'?' if number is None else number}",
            hint="copy to the CPU, or use a transport for it",
        )
    if hasattr(tensor, "is_contiguous"):
        if not tensor.is_contiguous():
            raise UsageError("cannot register a tensor that is not contiguous", hint="register its storage")
        length = int(tensor.numel()) * int(tensor.element_size())
    else:
        length = int(tensor.nbytes())  # an untyped storage: all that tensors are views of
    if length == 0:
        raise InvalidLength("cannot register an empty tensor", length=0)
    address = int(tensor.data_ptr())
    if kind == "cpu":
        return _borrowed(address, length, False, tensor)
    if number is None:
        raise UsageError("this tensor does not say on which device it is", hint="register its address and length")
    return BorrowedMemory(
        address=address, length=length, read_only=False, array=None, owner=tensor, kind=MemoryKind.HBM, device=number
    )


def _device_of(tensor: Any) -> tuple[str, int | None]:
    """Type and number of a tensor's device; torch's own object, or its text."""
    device = getattr(tensor, "device", "cpu")
    kind, number = getattr(device, "type", None), getattr(device, "index", None)
    if not isinstance(kind, str):
        kind, _, index = str(device).partition(":")
        number = int(index) if index.isdigit() else None
    return kind, number if isinstance(number, int) else None


def _from_dlpack(source: Any) -> BorrowedMemory:
    try:
        array = np.from_dlpack(source)
    except (BufferError, RuntimeError, TypeError) as wrong:
        raise RegistrationError(f"this DLPack object is not host memory: {wrong}") from wrong
    return _from_array(array, (source, array))
