"""What counts as memory: numpy arrays, anything with the buffer protocol, DLPack producers and torch tensors on the
CPU.

`borrow` finds address and length of the bytes without copying them and returns an object that keeps them alive. Only
contiguous memory qualifies: a gap inside a registration would be reachable by peers although it belongs to somebody
else.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.errors import InvalidLength, RegistrationError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowedMemory:
    """Bytes of somebody else: address, length, the same as an array (shape (length,)), and who keeps them alive."""

    address: int
    length: int
    read_only: bool
    array: npt.NDArray[np.uint8]
    owner: object


def borrow(source: Any) -> BorrowedMemory:
    """The memory behind ``source``; raises `UsageError` when it is not host memory, and says what was given."""
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
            hint="pass a numpy array, a torch tensor on the CPU, or anything with the buffer protocol or DLPack",
        ) from wrong
    if not view.contiguous:
        raise UsageError("cannot register memory that is not contiguous", hint="register the storage it is a view of")
    if view.nbytes == 0:
        raise InvalidLength("cannot register an empty buffer", length=0)
    return _from_array(np.frombuffer(view, dtype=np.uint8), view)


def _from_array(array: np.ndarray[Any, Any], owner: object) -> BorrowedMemory:
    if array.nbytes == 0:
        raise InvalidLength("cannot register an empty array", length=0)
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise UsageError("cannot register an array that is not contiguous", hint="register the array it is a view of")
    return _borrowed(array.ctypes.data, array.nbytes, not array.flags.writeable, owner)


def _borrowed(address: int, length: int, read_only: bool, owner: object) -> BorrowedMemory:
    raw = (ctypes.c_uint8 * length).from_address(address)
    raw.owner = owner  # type: ignore[attr-defined]  # whoever holds the array, or a part of it, holds the memory
    view = np.frombuffer(memoryview(raw).cast("B"), dtype=np.uint8)
    view.flags.writeable = not read_only
    return BorrowedMemory(address=address, length=length, read_only=read_only, array=view, owner=owner)


def _from_tensor(tensor: Any) -> BorrowedMemory:
    device = str(getattr(tensor, "device", "cpu"))
    if not device.startswith("cpu"):
        raise RegistrationError(
            f"no transport here reaches memory of device {device}", hint="copy to the CPU, or use a transport for it"
        )
    if not tensor.is_contiguous():
        raise UsageError("cannot register a tensor that is not contiguous", hint="register its storage")
    length = int(tensor.numel()) * int(tensor.element_size())
    if length == 0:
        raise InvalidLength("cannot register an empty tensor", length=0)
    return _borrowed(int(tensor.data_ptr()), length, False, tensor)


def _from_dlpack(source: Any) -> BorrowedMemory:
    try:
        array = np.from_dlpack(source)
    except (BufferError, RuntimeError, TypeError) as wrong:
        raise RegistrationError(f"this DLPack object is not host memory: {wrong}") from wrong
    return _from_array(array, (source, array))
