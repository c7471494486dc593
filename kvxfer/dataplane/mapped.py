"""Memory of a peer of this host, where it is: as a view for the CPU, or as an address for a device's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import TransportError

if TYPE_CHECKING:
    from kvxfer.dataplane.plane import DataPlane
    from kvxfer.dataplane.ways import Import


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory on an accelerator that kernels of this process may use: ``length`` bytes from ``address`` on, of the
    accelerator that this process knows as ``device``.
    """

    device: int
    address: int
    length: int


async def map_host(plane: DataPlane, descriptor: RemoteDescriptor) -> tuple[memoryview, Import]:
    """Host memory (no copy), and what to `DataPlane.unmap`; needs a transport of this host that can map."""
    if descriptor.kind != "dram":
        raise TransportError(
            "memory of an accelerator cannot be mapped for the CPU", peer=descriptor.node_id, hint="use get"
        )
    found = await plane.resolve_mapped(descriptor)
    view = plane.engine.mapping(found.handle)
    if view is None:
        raise _not_mapped(plane, found)
    return view, found


async def map_device(plane: DataPlane, descriptor: RemoteDescriptor) -> tuple[DeviceMemory, Import]:
    """The same for memory on an accelerator. It stays mapped until `DataPlane.unmap`, whatever becomes of its owner:
    kernels that run may not lose it.
    """
    found = await plane.resolve_mapped(descriptor)
    seen = plane.engine.device_mapping(found.handle)
    if seen is None:
        raise _not_mapped(plane, found)
    plane.hold_mapped(found)
    address, device = seen
    return DeviceMemory(device, address, descriptor.length), found


def _not_mapped(plane: DataPlane, found: Import) -> TransportError:
    plane.unmap(found)
    return TransportError(
        "this memory cannot be mapped from here", transport=found.route.info.name, hint="use get instead"
    )
