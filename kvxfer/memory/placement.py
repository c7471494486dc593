"""Which accelerator gets the next region, and how full one should be: decisions over numbers, nothing else.

Least loaded means most memory left: what the device has free, and what this engine holds of it unused. Only between
equals do live transfers decide, because they end soon and memory stays. Allocations under way count as done, so that a
burst of them does not all choose one card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvxfer.errors import UsageError

HEADROOM = 0.30  # of a device's memory that should stay free: fragments, workspaces of kernels, the framework's peaks
GROUP_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One candidate: bytes that a region could get, operations on its regions now."""

    device: int
    available_bytes: int
    live_tokens: int


def least_loaded(loads: Sequence[Load], pending_bytes: Mapping[int, int]) -> int:
    """The device for the next region; ``pending_bytes`` are being allocated on each device right now."""
    if not loads:
        raise UsageError("there is no device to choose from", field="group")

    def rank(load: Load) -> tuple[int, int, int]:
        return pending_bytes.get(load.device, 0) - load.available_bytes, load.live_tokens, load.device

    return min(loads, key=rank).device


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One part of a pool: bytes that are in use there, in flight ones included, and whether one more fits."""

    part: int
    bytes: int
    fits: bool


def least_held(parts: Sequence[Held]) -> int | None:
    """The part for what comes next; None when none has room."""
    fitting = [part for part in parts if part.fits]
    return min(fitting, key=lambda part: (part.bytes, part.part)).part if fitting else None


def check_group(group: object) -> tuple[int, ...]:
    """The devices among which one is chosen: distinct numbers, at least one."""
    found = tuple(group) if isinstance(group, list | tuple | range) else ()
    whole = all(isinstance(device, int) and not isinstance(device, bool) and device >= 0 for device in found)
    if not 0 < len(found) <= GROUP_MAX or not whole or len(set(found)) != len(found):
        raise UsageError(
            f"group must be a list of 1 to {GROUP_MAX} distinct device numbers", field="group", value=repr(group)[:80]
        )
    return found


def headroom_advice(free_bytes: int, total_bytes: int) -> str | None:
    """What to tell people about a device's memory; None when there is room enough."""
    if total_bytes <= 0 or free_bytes >= HEADROOM * total_bytes:
        return None
    free = f"{free_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB are free"
    return (
        f"{free}, less than {HEADROOM:.0%}: a large block may not be found in one piece; lower the framework's share "
        "of the memory, or allocate with spill='dram'"
    )
