"""Memory of a device, or of another process, in the clothes of a numpy array, as far as the tests need them: each look
is a copy."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvxfer.native.engine import RegionInfo


class Copies(Protocol):
    """An engine, as far as this goes."""

    def read_into(self, region: int, offset: int, target: Any) -> None: ...

    def write(self, region: int, offset: int, data: Any) -> None: ...


class DeviceBytes:
    """All bytes of a region that this process cannot touch."""

    def __init__(self, engine: Copies, region: RegionInfo) -> None:
        self._engine, self.region = engine, region

    def __len__(self) -> int:
        return self.region.length

    def copy(self) -> npt.NDArray[np.uint8]:
        out = np.empty(len(self), dtype=np.uint8)
        self._engine.read_into(self.region.id, 0, out)
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self.copy() if dtype is None else self.copy().astype(dtype)

    def _span(self, key: int | slice) -> tuple[int, int]:
        if isinstance(key, slice):
            start, stop, stride = key.indices(len(self))
            assert stride == 1
            return start, max(stop - start, 0)
        return range(len(self))[key], 1

    def __getitem__(self, key: int | slice) -> Any:
        start, length = self._span(key)
        out = np.empty(length, dtype=np.uint8)
        self._engine.read_into(self.region.id, start, out)
        return out if isinstance(key, slice) else out[0]

    def __setitem__(self, key: int | slice, value: Any) -> None:
        start, length = self._span(key)
        data = np.ascontiguousarray(np.broadcast_to(np.asarray(value).astype(np.uint8), (length,)))
        self._engine.write(self.region.id, start, data)

    def __eq__(self, other: object) -> Any:
        return self.copy() == other

    __hash__ = None  # type: ignore[assignment]

    def reshape(self, *shape: int) -> npt.NDArray[np.uint8]:
        return self.copy().reshape(*shape)
