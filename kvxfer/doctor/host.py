"""Looking at memory, limits, NUMA and clock. Reads /proc and /sys, tries a few system calls, changes nothing.

``root`` is where /proc and /sys are looked for, so that a made-up tree can stand in for another host.
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import re
import resource
import time
from collections.abc import Callable, Iterator
from errno import EPERM, errorcode
from functools import partial
from pathlib import Path
from typing import Any

from cffi import FFI

from kvxfer.config import Config
from kvxfer.doctor.facts import UNLIMITED, Clock, Finding, FindingGroup, Host, Numa, Pages, size, some
from kvxfer.memory.allocation import HEADROOM

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
    """The errno of a call that failed; 0 when it worked."""
    try:
        trial()
    except OSError as failure:
        return failure.errno or errno.EIO
    return 0


# By libc alone: the engine may be what does not load on this host.
_ffi = FFI()
_ffi.cdef("""
    struct iovec { void *iov_base; size_t iov_len; };
    ssize_t process_vm_readv(int pid, const struct iovec *local, unsigned long locals, const struct iovec *remote,
                             unsigned long remotes, unsigned long flags);
    long syscall(long number, ...);
""")


def _libc() -> Any:
    return _ffi.dlopen(None)


def _checked(result: int) -> None:
    if result < 0:
        raise OSError(_ffi.errno, os.strerror(_ffi.errno))


def _try_memfd() -> None:
    descriptor = os.memfd_create("kvxfer-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        mmap.mmap(descriptor, mmap.PAGESIZE).close()
    finally:
        os.close(descriptor)


def _try_attach() -> None:
    """Read eight bytes of our own: what forbids even that is a sandbox, or the kernel has no such call."""
    source, target = _ffi.new("char[]", b"12345678"), _ffi.new("char[8]")
    local = _ffi.new("struct iovec *", {"iov_base": target, "iov_len": 8})
    remote = _ffi.new("struct iovec *", {"iov_base": source, "iov_len": 8})
    try:
        call = _libc().process_vm_readv
    except AttributeError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    _checked(call(os.getpid(), local, 1, remote, 1, 0))


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
        mask = _ffi.new("unsigned long[]", NODE_BITS_MAX // 64)
        mask[node // 64] = 1 << node % 64
        with _ffi.from_buffer(page) as anchor:
            number_of = partial(_ffi.cast, "unsigned long")  # a variadic function is told the type of each argument
            length, policy, bits = number_of(mmap.PAGESIZE), number_of(MPOL_PREFERRED), number_of(NODE_BITS_MAX)
            place = _ffi.cast("void *", anchor)
            _checked(_libc().syscall(number, place, length, policy, mask, bits, number_of(0)))
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


# -- judging memory, limits, NUMA and clock of a host against what the configuration will ask of it --------------------


OWN_BYTES = 60 << 20  # a daemon without its pools
MAPS_PER_REGION = 2
SLOW_CLOCKS = frozenset(("hpet", "acpi_pm", "pit", "jiffies", "refined-jiffies"))
CLOCK_READ_NS_MAX = 2000
_MEMORY = FindingGroup("memory")
_LIMITS = FindingGroup("limits")
_CLOCK = FindingGroup("clock")


def judge_host(host: Host, config: Config) -> Iterator[Finding]:
    """Everything about the host itself."""
    yield _memlock(host, config)
    yield from _hugepages(host, config)
    yield _shared_memory(host)
    yield _headroom(host, config)
    yield _attach(host, config)
    yield _judge_numa(host)
    yield _descriptors(host, config)
    yield _maps(host, config)
    yield _judge_clock(host)


def wanted_bytes(config: Config) -> int:
    """Host memory that a daemon may come to use."""
    return landing_bytes(config) + config.mailboxes_bytes_max + OWN_BYTES


def landing_bytes(config: Config) -> int:
    """Of that, the landing pool, unless it is on accelerators."""
    return config.landing_bytes_max if config.landing_memory == "dram" else 0


def _limit(value: int) -> str:
    return "unlimited" if value == UNLIMITED else size(value)


def _memlock(host: Host, config: Config) -> Finding:
    soft, hard = host.memlock
    need = landing_bytes(config)
    if soft == UNLIMITED or "CAP_IPC_LOCK" in host.capabilities:
        why = "unlimited" if soft == UNLIMITED else f"{_limit(soft)}, which does not bind a process with CAP_IPC_LOCK"
        return _LIMITS.ok("locked memory", why)
    found = f"ulimit -l is {_limit(soft)} (hard limit {_limit(hard)}); the landing pool alone is {size(need)}"
    if soft >= need:
        return _LIMITS.ok("locked memory", found)
    advice = (
        "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1. Pinned memory is refused"
        " above the limit; shm and tcp on ordinary pages do not lock any"
    )
    return _LIMITS.warning("locked memory", found, advice)


def _hugepages(host: Host, config: Config) -> Iterator[Finding]:
    if not config.hugepages:
        yield _MEMORY.not_here("hugepages", "turned off (hugepages = false)")
        return
    need = landing_bytes(config)
    reserved = [pages for pages in host.pages if pages.total]
    for pages in reserved:
        unit = size(pages.page_bytes)
        free = pages.free * pages.page_bytes
        found = f"{pages.free} of {pages.total} pages of {unit} are free ({size(free)}); landing pool {size(need)}"
        if free >= need:
            yield _MEMORY.ok("hugepages", found)
        else:
            count = -(-need // pages.page_bytes)
            advice = f"allocations beyond that use ordinary pages: reserve {count} of them for kvxfer alone"
            yield _MEMORY.warning("hugepages", found, advice)
    if not reserved:
        count = -(-need // (2 << 20))
        advice = f"optional: sysctl vm.nr_hugepages={count} (2 MiB each), and a hugepages-2Mi limit for a pod"
        yield _MEMORY.not_here("hugepages", "none are reserved; ordinary pages are used", advice)


def _shared_memory(host: Host) -> Finding:
    unused = "" if host.tmpfs_bytes is None else f"; /dev/shm has {size(host.tmpfs_bytes)}, which kvxfer does not use"
    if host.memfd_errno:
        found = f"memfd_create fails ({errorcode.get(host.memfd_errno, host.memfd_errno)})"
        return _MEMORY.problem("shared memory", found, "allow memfd_create in the sandbox: shm cannot work without it")
    return _MEMORY.ok("shared memory", f"memfd works{unused}")


def _headroom(host: Host, config: Config) -> Finding:
    need = wanted_bytes(config)
    free, where = host.memory_available, "on this host"
    if host.container_limit is not None and host.container_limit - host.container_used < free:
        free, where = max(host.container_limit - host.container_used, 0), "under the limit of the container"
    found = f"{size(free)} free {where}; a daemon may use {size(need)}"
    advice = f"leave {HEADROOM:.0%} free: lower landing_bytes_max to {size(_fitting(free, config))}"
    if where != "on this host":
        advice += ", or raise the limit (memory that workers share counts for whoever touches it first)"
    if need > free:
        return _MEMORY.problem("headroom", found, advice)
    if need > free * (1 - HEADROOM):
        return _MEMORY.warning("headroom", found, advice)
    return _MEMORY.ok("headroom", found)


def _fitting(free: int, config: Config) -> int:
    """A landing pool that leaves the headroom; whole MiB."""
    room = int(free * (1 - HEADROOM)) - (wanted_bytes(config) - landing_bytes(config))
    return max(room, 0) >> 20 << 20


def _attach(host: Host, config: Config) -> Finding:
    check = "cross-memory attach"
    if not config.cross_memory_attach:
        return _LIMITS.not_here(check, "turned off (cross_memory_attach = false)")
    effect = "until then memory that a worker allocated itself goes by tcp; memory from alloc() is not concerned"
    if host.attach_errno:
        name = errorcode.get(host.attach_errno, str(host.attach_errno))
        advice = f"allow process_vm_readv and process_vm_writev in the container's seccomp profile; {effect}"
        return _LIMITS.warning(check, f"process_vm_readv fails with {name} even on this process", advice)
    if "CAP_SYS_PTRACE" in host.capabilities or not host.ptrace_scope:
        scope = "not restricted" if not host.ptrace_scope else "allowed by CAP_SYS_PTRACE"
        return _LIMITS.ok(check, f"{scope}, between processes of one user (and of one pid namespace)")
    who = {1: "parents and children only", 2: "CAP_SYS_PTRACE only"}.get(host.ptrace_scope, "nobody")
    advice = f"sysctl kernel.yama.ptrace_scope=0; {effect}"
    return _LIMITS.warning(check, f"kernel.yama.ptrace_scope is {host.ptrace_scope}: {who}", advice)


def _judge_numa(host: Host) -> Finding:
    numa = host.numa
    cards = f"; accelerators on node {some(sorted(set(numa.cards.values())))}" if numa.cards else ""
    if len(numa.nodes) < 2:
        return _MEMORY.ok("numa", f"one node: nothing to place{cards}")
    nodes = f"{len(numa.nodes)} nodes{cards}"
    if numa.mbind_errno:
        why = "EPERM" if numa.mbind_errno == EPERM else errorcode.get(numa.mbind_errno, str(numa.mbind_errno))
        advice = "add the capability SYS_NICE, or allow mbind in the seccomp profile; until then speed varies"
        return _MEMORY.warning("numa", f"{nodes}; NUMA policy not applied (mbind: {why})", advice)
    return _MEMORY.ok("numa", f"{nodes}; memory can be placed (numa_node = N)")


def _descriptors(host: Host, config: Config) -> Finding:
    soft, hard = host.descriptors
    need = 4 * (config.links_max + config.workers_max) + config.accepted_max
    shown = "unlimited" if soft == UNLIMITED else str(soft)
    if soft == UNLIMITED or soft >= need:
        return _LIMITS.ok("open files", f"{shown}; {need} cover every configured maximum")
    found = f"ulimit -n is {soft} (hard limit {'unlimited' if hard == UNLIMITED else hard}); full use needs {need}"
    advice = "ulimit -n 65536; systemd: LimitNOFILE=65536; docker: --ulimit nofile=65536. Until then fewer links"
    if soft < 256:
        return _LIMITS.problem("open files", found, advice)
    return _LIMITS.warning("open files", found, advice)


def _maps(host: Host, config: Config) -> Finding:
    need = MAPS_PER_REGION * config.regions_max
    found = f"vm.max_map_count is {host.maps_max}; regions_max {config.regions_max}"
    if host.maps_max < need:
        return _LIMITS.warning("memory maps", found, f"sysctl vm.max_map_count={max(need, 65530)}")
    return _LIMITS.ok("memory maps", found)


def _judge_clock(host: Host) -> Finding:
    clock = host.clock
    found = f"{clock.source or 'unknown source'}, {clock.read_ns:.0f} ns a reading"
    if clock.backwards:
        advice = "deadlines cannot be trusted here: change the clock source, and tell the vendor of the hypervisor"
        return _CLOCK.problem("monotonic clock", f"{found}; went backwards {clock.backwards} times", advice)
    if clock.source in SLOW_CLOCKS or clock.read_ns > CLOCK_READ_NS_MAX:
        advice = "use a faster clock source (tsc, kvm-clock, arch_sys_counter) if the machine has one"
        return _CLOCK.warning("monotonic clock", f"{found}: slow", advice)
    return _CLOCK.ok("monotonic clock", found)
