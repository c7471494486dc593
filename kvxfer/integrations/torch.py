"""KV caches of torch tensors: what kvxfer needs to know of them (`cache_of`), and moving them into memory that peers
reach without a copy (`rehome`).

`cache_of` reads strides and storages; it touches no element. Every tensor lies in a storage, and storages are what is
registered: views of one allocation share a region, and a tensor is found in it by its offset.

`rehome` exchanges the storage of the tensors (`Tensor.set_`): whoever holds the tensors, an engine's layers among them,
goes on with the same objects in other memory. Tensors of that storage that were not named would stay behind and from
then on show other memory than their siblings, so their number is counted, and any of them is a refusal.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from kvxfer.errors import RegionBusy, UsageError
from kvxfer.geometry import ITEMSIZES
from kvxfer.integrations.engines import groups_of
from kvxfer.integrations.tensors import LayerGroup, TensorCaches, TensorView, caches_of
from kvxfer.memory.region import Region
from kvxfer.tasks import in_thread

if TYPE_CHECKING:
    from kvxfer.client import Client

KvTensors = Mapping[str, torch.Tensor | Sequence[torch.Tensor]]


def cache_of(
    caches: KvTensors,
    *,
    axes: str | tuple[str, ...] = "",
    groups: Sequence[LayerGroup] = (),
    kv_cache_config: Any = None,
    backend: str | Mapping[str, str] = "",
    **more: Any,
) -> TensorCaches:
    """What kvxfer needs to know of these tensors, by layer name: a tensor, or a tuple of tensors (K, V, ...).

    One of three says what the axes mean. ``axes``, a word such as "PBNHD" (see `kvxfer.integrations.tensors.AXES_RULE`)
    for all layers, which then are one group; ``more`` are fields of `LayerGroup`. ``groups``, for several groups. Or
    vLLM's ``kv_cache_config`` with the name of the attention ``backend`` (for all, or by layer), see
    `kvxfer.integrations.engines.groups_of`, which takes ``more``.

    Raises `UsageError`, with the layer's name, for whatever is not known or cannot be described: sparse, quantised,
    nested or meta tensors, negative or repeating strides, a backend whose packing is not known; `OverlapError` for
    layers of one group that share bytes in part.
    """
    if sum(map(bool, (axes, groups, kv_cache_config is not None))) != 1:
        raise UsageError("one of axes, groups and kv_cache_config says what the tensors mean", field="axes")
    named = {name: _tensors(name, value) for name, value in caches.items()}
    storages = _Storages([tensor for tensors in named.values() for tensor in tensors])
    layers = {name: tuple(_view_of(tensor, storages) for tensor in tensors) for name, tensors in named.items()}
    if axes:
        groups = (LayerGroup(names=tuple(named), axes=axes, **_known(more)),)
    elif kv_cache_config is not None:
        groups = groups_of(kv_cache_config, layers, backend=backend, **more)
    elif more or backend:
        raise UsageError("groups say everything themselves", field=next(iter(more), "backend"))
    parts = caches_of(layers, groups, [storage.nbytes() for storage in storages.found])
    return TensorCaches(caches=parts, storages=tuple(storages.found))


def _known(more: dict[str, Any]) -> dict[str, Any]:
    for name in more:
        if name not in LayerGroup.__slots__ or name in ("names", "axes"):
            raise UsageError("cache_of does not take this", field=name)
    return more


def _tensors(name: str, value: object) -> tuple[torch.Tensor, ...]:
    found = tuple(value) if isinstance(value, tuple | list) else (value,)
    for tensor in found:
        if not isinstance(tensor, torch.Tensor):
            raise UsageError("a layer is a tensor, or a tuple of tensors", layer=name, got=type(tensor).__name__)
        for what, wrong in (
            ("is sparse", tensor.layout != torch.strided),
            ("is nested", tensor.is_nested),
            ("is quantised: its scales would not travel", tensor.is_quantized),
            ("is on the meta device, it has no memory", tensor.device.type == "meta"),
            ("is the conjugate or negative of what is in memory", tensor.is_conj() or tensor.is_neg()),
        ):
            if wrong:
                raise UsageError(f"a tensor of the cache {what}", layer=name)
        if _dtype(tensor) not in ITEMSIZES:
            raise UsageError("a cache of this dtype is not known", layer=name, field="dtype", value=_dtype(tensor))
        if tensor.numel() == 0:
            raise UsageError("a tensor of the cache is empty", layer=name, shape=str(tuple(tensor.shape)))
    return found


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _view_of(tensor: torch.Tensor, storages: _Storages) -> TensorView:
    index, offset = storages.find(tensor)
    return TensorView(
        storage=index,
        offset=offset,
        shape=tuple(map(int, tensor.shape)),
        strides=tuple(map(int, tensor.stride())),
        dtype=_dtype(tensor),
    )


class _Storages:
    """The allocations that tensors lie in, each once, in the order of the tensors. One that lies inside another is that
    other one: the same memory may be known to torch by several storages.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        every: dict[tuple[str, int, int], torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            every.setdefault((str(storage.device), storage.data_ptr(), storage.nbytes()), storage)
        self._spans = [one for one in every if not any(_inside(one, other) for other in every)]
        self.found = [every[span] for span in self._spans]

    def find(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Which one a tensor lies in, and how many bytes from its begin."""
        device, address = str(tensor.untyped_storage().device), tensor.data_ptr()
        for index, (of, begin, length) in enumerate(self._spans):
            if of == device and begin <= address < begin + length:
                return index, address - begin
        raise UsageError("a tensor lies outside of its storage")


def _inside(one: tuple[str, int, int], other: tuple[str, int, int]) -> bool:
    same_device = one[0] == other[0] and one != other
    return same_device and other[1] <= one[1] and one[1] + one[2] <= other[1] + other[2]


def _copy(storage: torch.UntypedStorage, region: Region) -> None:
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    region.array[:] = whole.numpy()


# -- another home -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """A tensor and where it lies: which storage, and how many elements from its begin. The tensor is not kept alive."""

    tensor: weakref.ref[torch.Tensor]
    storage: int
    offset: int


class Home:
    """Regions that tensors were moved into, in the order of `TensorCaches.storages`.

    While a tensor lies in one of them, `Region.release` refuses it (`RegionBusy`). `release` moves the tensors out
    again first, with what they hold, and so does the close of the client. Tensors that were made of them since stay
    behind then, in memory of the process that no peer reaches any more, and read zeros.
    """

    def __init__(self, regions: Sequence[Region], storages: Sequence[torch.UntypedStorage], moves: list[_Move]) -> None:
        self.regions = tuple(regions)
        self._storages = list(storages)
        self._moves = moves
        for index, (region, storage) in enumerate(zip(self.regions, self._storages, strict=True)):
            region.guard(partial(_lying_in, storage), partial(self._move_out, index))

    async def release(self, *, timeout: float | None = None) -> None:
        """Move the tensors back into torch's own memory with what they hold, and release the regions.

        Raises `RegionBusy` when other tensors lie in a region (views that were made since), or transfers use it; what
        was moved by then has been moved. End the requests of the cache before: bytes that arrive meanwhile are lost.
        """
        for index, region in enumerate(self.regions):
            lying = [tensor for move in self._moves if move.storage == index and (tensor := move.tensor()) is not None]
            _require_alone(self._storages[index], lying, region.id)
            del lying
            await in_thread(self._move_out, index)
            await region.release(timeout=timeout)

    def forget(self) -> None:
        """The tensors are not needed any more (the engine ends): the close of the client does not copy them out, and
        what they hold is undefined from then on.
        """
        self._moves = []

    def _move_out(self, index: int) -> None:
        """In any thread: the tensors of one region go back into torch's own memory."""
        moves = [move for move in self._moves if move.storage == index and move.tensor() is not None]
        if moves:
            fresh = torch.empty(self.regions[index].length, dtype=torch.uint8)
            fresh.numpy()[:] = self.regions[index].array
            _settle(moves, {index: fresh.untyped_storage()})
            self._moves = [move for move in self._moves if move.storage != index]


def _lying_in(storage: torch.UntypedStorage) -> str:
    others = _users(storage)
    return f"{others} tensors lie in it" if others else ""


def _users(storage: torch.UntypedStorage) -> int:
    """How many tensors have this storage, besides the object at hand."""
    return torch._C._storage_Use_Count(storage._cdata) - 1


async def rehome(
    client: Client, caches: KvTensors, *, numa_node: int | str | None = None, timeout: float | None = None
) -> Home:
    """Move the tensors of a cache, which lie in host memory, into memory of ``client.alloc``; contents, shapes, strides
    and what is a view of what stay. The tensors are the same objects as before. Nobody may use them meanwhile.

    All or nothing: until every byte is copied, no tensor has moved. Needs the memory of the cache a second time until
    it is done. Raises `UsageError` (nothing has changed then) for tensors on a device, for those that need a gradient
    and when other tensors than these share their storage: name all of them, or drop them. And what `Client.alloc`
    raises.
    """
    tensors = _distinct(caches)
    _require_movable(tensors)
    storages = _Storages(tensors)
    moves = _moves_of(tensors, storages)
    regions: list[Region] = []
    try:
        for storage in storages.found:
            region = await client.alloc(storage.nbytes(), numa_node=numa_node, timeout=timeout)
            regions.append(region)
            await in_thread(_copy, storage, region)
        fresh = [torch.from_numpy(region.array).untyped_storage() for region in regions]
        _settle(moves, dict(enumerate(fresh)))
    except BaseException:
        for region in regions:
            await asyncio.shield(region.release())
        raise
    return Home(regions, fresh, moves)


def _require_movable(tensors: Sequence[torch.Tensor]) -> None:
    by_storage: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise UsageError(
                "only tensors in host memory can be moved into this memory",
                device=str(tensor.device),
                hint="register them where they are (Client.register_many of cache_of(...).storages)",
            )
        if tensor.requires_grad:
            raise UsageError("a tensor that needs a gradient does not change its memory")
        by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    for of in by_storage.values():
        _require_alone(of[0].untyped_storage(), of)


def _distinct(caches: KvTensors) -> list[torch.Tensor]:
    named = {name: _tensors(name, value) for name, value in caches.items()}
    return list({id(tensor): tensor for of in named.values() for tensor in of}.values())


def _moves_of(tensors: Sequence[torch.Tensor], storages: _Storages) -> list[_Move]:
    moves = []
    for tensor in tensors:
        index, offset = storages.find(tensor)
        if offset % tensor.element_size():
            raise UsageError("a tensor does not begin at a multiple of its elements", offset=offset)
        moves.append(_Move(tensor=weakref.ref(tensor), storage=index, offset=offset // tensor.element_size()))
    return moves


def _require_alone(storage: torch.UntypedStorage, tensors: Sequence[torch.Tensor], region: int | None = None) -> None:
    """No tensor has this storage besides these, and one that they are views of and that nobody else holds."""
    known = {id(tensor) for tensor in tensors}
    known |= {id(tensor._base) for tensor in tensors if _is_held_by_views_alone(tensor, storage)}
    others = _users(storage) - len(known)
    if others > 0:
        kind = UsageError if region is None else RegionBusy
        raise kind(
            f"{others} other tensors share the memory of these, and would stay behind",
            region=region,
            tensors=len(tensors),
            hint="name all tensors of the cache that share memory, and drop other views of it",
        )


def _is_held_by_views_alone(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether this is a view of a tensor in that storage, which no other Python object refers to."""
    if tensor._base is None or tensor._base.untyped_storage()._cdata != storage._cdata:
        return False
    with torch.inference_mode(False):
        unheld = _references(torch.empty(1, dtype=torch.uint8)[:])  # what torch itself counts
    return _references(tensor) <= unheld


def _references(tensor: torch.Tensor) -> int:
    """References to the Python object of the tensor that this one is a view of, those of this function included."""
    base = tensor._base
    return sys.getrefcount(base)


def _settle(moves: Sequence[_Move], storages: Mapping[int, torch.UntypedStorage]) -> None:
    """Exchange the storages: of all tensors, or of none. In inference mode, which tensors of inference mode need and
    others do not mind.
    """
    living = [(tensor, move) for move in moves if (tensor := move.tensor()) is not None]
    before = [(tensor, tensor.untyped_storage(), tensor.storage_offset()) for tensor, _ in living]
    with torch.inference_mode():
        try:
            for tensor, move in living:
                _set(tensor, storages[move.storage], move.offset)
        except BaseException:
            for tensor, storage, offset in before:
                _set(tensor, storage, offset)
            raise


def _set(tensor: torch.Tensor, storage: torch.UntypedStorage, offset: int) -> None:
    _set_like(tensor, storage, tensor, offset)


def _set_like(tensor: torch.Tensor, storage: torch.UntypedStorage, shape: torch.Tensor, offset: int = 0) -> None:
    tensor.set_(storage, offset, tuple(shape.shape), tuple(shape.stride()))


# -- born at home -----------------------------------------------------------------------------------------------------


class MemoryPool(TorchFunctionMode):
    """Inside ``with pool:`` what `torch.zeros` and `torch.empty` make of host memory, ``bytes_min`` bytes or more, lies
    in memory of a client: a cache that an engine allocates there needs no move, and is never there twice.

    ``alloc`` makes a region of so many bytes, waiting for it: `kvxfer.ThreadedClient.alloc`, for example. What it
    raises comes out of the call of torch. The pool is what vLLM (0.32) asks a connector for by `get_mem_pool_context`;
    `home` then is what `rehome` would have returned.
    """

    def __init__(self, alloc: Callable[[int], Region], *, bytes_min: int = 1 << 20) -> None:
        super().__init__()
        self._alloc = alloc
        self._bytes_min = bytes_min
        self._made: dict[int, tuple[Region, torch.UntypedStorage]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func not in (torch.zeros, torch.empty) or not set(named) <= {"size", "dtype", "device"}:
            return func(*args, **named)
        device = named.get("device")
        if torch.device(torch.get_default_device() if device is None else device).type != "cpu":
            return func(*args, **named)
        shape = func(*args, **{**named, "device": "meta"})
        length = shape.numel() * shape.element_size()
        if length < max(self._bytes_min, 1):
            return func(*args, **named)
        region = self._alloc(length)
        storage = torch.from_numpy(region.array).untyped_storage()
        self._made[storage.data_ptr()] = (region, storage)
        made = torch.empty(0, dtype=shape.dtype)
        _set_like(made, storage, shape)
        return made.zero_() if func is torch.zeros else made

    def home(self, caches: KvTensors) -> Home:
        """The regions that these tensors lie in, in the order of `TensorCaches.storages`.

        Raises `UsageError` when one of them was not made in this pool.
        """
        tensors = _distinct(caches)
        storages = _Storages(tensors)
        found = []
        for storage in storages.found:
            made = self._made.get(storage.data_ptr())
            if made is None:
                raise UsageError(
                    "a tensor was not made in this pool",
                    length=storage.nbytes(),
                    hint="make it by torch.zeros or torch.empty inside `with pool:`, or move it with rehome",
                )
            found.append(made)
        moves = _moves_of(tensors, storages)
        return Home([region for region, _ in found], [storage for _, storage in found], moves)
