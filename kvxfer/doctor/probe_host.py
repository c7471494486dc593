"""Looking at memory, limits, NUMA and clock. Reads /proc and /sys, tries a few system calls, changes nothing.

``root`` is where /proc and /sys are looked for, so that a made-up tree can stand in for another host.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path

from kvxfer.doctor.facts import UNLIMITED, Clock, Host, Numa, Pages

# Bits of capability sets that matter here.
CAPABILITIES = {"CAP_IPC_LOCK": 14, "CAP_SYS_PTRACE": 19, "CAP_SYS_NICE": 23, "CAP_SYS_RESOURCE": 24}
MBIND = {"x86_64": 237, "aarch64": 235}
MPOL_PREFERRED = 1
NODE_BITS_MAX = 1024
HUAWEI, PROCESSING_ACCELERATOR = "0x19e5", "0x1200"
NO_LIMIT_BYTES = 1 << 60  # what control groups show when there is no limit
CLOCK_READINGS = 2000


class Tree:
    """Small files below a root."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str | None:
        """The content without surrounding blanks; None when it cannot be read."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        text = self.text(name)
        return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else None

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(self.path(folder)))
        except OSError:
            return []


def probe_host(root: Path = Path("/")) -> Host:
    """Everything that `judge_host` wants to know."""
    tree = Tree(root)
    memory = _meminfo(tree)
    limit, used = _container(tree)
    return Host(
        memlock=_limits(resource.RLIMIT_MEMLOCK),
        descriptors=_limits(resource.RLIMIT_NOFILE),
        capabilities=_capabilities(tree),
        pages=_pages(tree),
        memfd_errno=_errno_of(_try_memfd),
        tmpfs_bytes=_file_system_bytes(tree.path("/dev/shm")),
        memory_total=memory.get("MemTotal", 0),
        memory_available=memory.get("MemAvailable", 0),
        container_limit=limit,
        container_used=used,
        ptrace_scope=tree.number("/proc/sys/kernel/yama/ptrace_scope"),
        attach_errno=_errno_of(_try_attach),
        maps_max=tree.number("/proc/sys/vm/max_map_count") or 65530,
        numa=_numa(tree),
        clock=_clock(tree),
    )


def _limits(which: int) -> tuple[int, int]:
    soft, hard = resource.getrlimit(which)
    unlimited = resource.RLIM_INFINITY
    return (UNLIMITED if soft == unlimited else soft, UNLIMITED if hard == unlimited else hard)


def _capabilities(tree: Tree) -> frozenset[str]:
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", tree.text("/proc/self/status") or "", re.MULTILINE)
    bits = int(match[1], 16) if match else 0
    return frozenset(name for name, bit in CAPABILITIES.items() if bits >> bit & 1)


def _meminfo(tree: Tree) -> dict[str, int]:
    text = tree.text("/proc/meminfo") or ""
    return {name: int(kib) << 10 for name, kib in re.findall(r"^(\w+):\s*(\d+) kB$", text, re.MULTILINE)}


def _pages(tree: Tree) -> tuple[Pages, ...]:
    found = []
    for name in tree.names("/sys/kernel/mm/hugepages"):
        folder = f"/sys/kernel/mm/hugepages/{name}"
        match = re.fullmatch(r"hugepages-(\d+)kB", name)
        total, free = tree.number(f"{folder}/nr_hugepages"), tree.number(f"{folder}/free_hugepages")
        if match and total is not None and free is not None:
            found.append(Pages(page_bytes=int(match[1]) << 10, total=total, free=free))
    return tuple(sorted(found, key=lambda pages: pages.page_bytes))


def _container(tree: Tree) -> tuple[int | None, int]:
    """The lowest memory limit of this process's control groups, and what counts towards it."""
    tightest: tuple[int, int] | None = None
    for folder, limit_name, used_name in _memory_groups(tree):
        limit, used = tree.number(f"{folder}/{limit_name}"), tree.number(f"{folder}/{used_name}") or 0
        if limit is not None and limit < NO_LIMIT_BYTES and (tightest is None or limit - used < sum_of(tightest)):
            tightest = (limit, used)
    return tightest if tightest is not None else (None, 0)


def sum_of(pair: tuple[int, int]) -> int:
    """What is left of a limit."""
    return pair[0] - pair[1]


def _memory_groups(tree: Tree) -> list[tuple[str, str, str]]:
    """(folder, file of the limit, file of the use), for both versions of control groups, from the root down."""
    found = []
    for line in (tree.text("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            base, names = "/sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = "/sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        found += [("/".join([base, *parts[:depth]]), *names) for depth in range(len(parts) + 1)]
    return found


def _file_system_bytes(path: Path) -> int | None:
    try:
        facts = os.statvfs(path)
    except OSError:
        return None
    return facts.f_bsize * facts.f_blocks


# -- system calls that a sandbox may forbid ---------------------------------------------------------------------------


def _errno_of(trial: Callable[[], None]) -> int:
    """0 when it worked."""
    try:
        trial()
    except OSError as failure:
        return failure.errno or errno.EIO
    return 0


def _checked(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _try_memfd() -> None:
    descriptor = os.memfd_create("kvxfer-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        mmap.mmap(descriptor, mmap.PAGESIZE).close()
    finally:
        os.close(descriptor)


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _try_attach() -> None:
    """Read eight bytes of our own: what forbids even that is a sandbox, or the kernel has no such call."""
    source, target = ctypes.create_string_buffer(b"12345678"), ctypes.create_string_buffer(8)
    local, remote = _Vector(ctypes.addressof(target), 8), _Vector(ctypes.addressof(source), 8)
    call = getattr(_libc(), "process_vm_readv", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    call.restype = ctypes.c_ssize_t
    _checked(call(os.getpid(), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0))


def _numa(tree: Tree) -> Numa:
    matches = (re.fullmatch(r"node(\d+)", name) for name in tree.names("/sys/devices/system/node"))
    nodes = tuple(sorted(int(match[1]) for match in matches if match)) or (0,)
    number = MBIND.get(platform.machine())
    denied = None if number is None else _errno_of(lambda: _try_mbind(number, nodes[0]))
    return Numa(nodes=nodes, mbind_errno=denied, cards=_cards(tree))


def _try_mbind(number: int, node: int) -> None:
    """Prefer a node for a page of our own that nobody has touched."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        anchor = ctypes.c_char.from_buffer(page)
        mask = (ctypes.c_ulong * (NODE_BITS_MAX // 64))()
        mask[node // 64] = 1 << node % 64
        address = ctypes.c_void_p(ctypes.addressof(anchor))
        length, bits = ctypes.c_ulong(mmap.PAGESIZE), ctypes.c_ulong(NODE_BITS_MAX)
        call = _libc().syscall
        call.restype = ctypes.c_long
        result = call(ctypes.c_long(number), address, length, MPOL_PREFERRED, mask, bits, 0)
        failed = ctypes.get_errno()
        del anchor
        if result < 0:
            raise OSError(failed, os.strerror(failed))
    finally:
        page.close()


def _cards(tree: Tree) -> dict[str, int]:
    """PCI address to NUMA node of every accelerator of the one vendor that we know."""
    found = {}
    for name in tree.names("/sys/bus/pci/devices"):
        folder = f"/sys/bus/pci/devices/{name}"
        kind = tree.text(f"{folder}/class") or ""
        if tree.text(f"{folder}/vendor") == HUAWEI and kind.startswith(PROCESSING_ACCELERATOR):
            node = tree.number(f"{folder}/numa_node")
            found[name] = 0 if node is None else max(node, 0)
    return found


def _clock(tree: Tree) -> Clock:
    backwards, last = 0, time.monotonic_ns()
    started = last
    for _ in range(CLOCK_READINGS):
        now = time.monotonic_ns()
        backwards += now < last
        last = now
    return Clock(
        source=tree.text("/sys/devices/system/clocksource/clocksource0/current_clocksource") or "",
        backwards=backwards,
        read_ns=(last - started) / CLOCK_READINGS,
        resolution_ns=time.get_clock_info("monotonic").resolution * 1e9,
    )
