"""Judging memory, limits, NUMA and clock of a host against what the configuration will ask of it."""

from __future__ import annotations

from collections.abc import Iterator
from errno import EPERM, errorcode

from kvxfer.config import Config
from kvxfer.doctor.facts import UNLIMITED, Host
from kvxfer.doctor.finding import Finding, Group, size, some
from kvxfer.memory.placement import HEADROOM

OWN_BYTES = 60 << 20  # a daemon without its pools
MAPS_PER_REGION = 2
SLOW_CLOCKS = frozenset(("hpet", "acpi_pm", "pit", "jiffies", "refined-jiffies"))
CLOCK_READ_NS_MAX = 2000
_MEMORY = Group("memory")
_LIMITS = Group("limits")
_CLOCK = Group("clock")


def judge_host(host: Host, config: Config) -> Iterator[Finding]:
    """Everything about the host itself."""
    yield _memlock(host, config)
    yield from _hugepages(host, config)
    yield _shared_memory(host)
    yield _headroom(host, config)
    yield _attach(host, config)
    yield _numa(host)
    yield _descriptors(host, config)
    yield _maps(host, config)
    yield _clock(host)


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


def _numa(host: Host) -> Finding:
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


def _clock(host: Host) -> Finding:
    clock = host.clock
    found = f"{clock.source or 'unknown source'}, {clock.read_ns:.0f} ns a reading"
    if clock.backwards:
        advice = "deadlines cannot be trusted here: change the clock source, and tell the vendor of the hypervisor"
        return _CLOCK.problem("monotonic clock", f"{found}; went backwards {clock.backwards} times", advice)
    if clock.source in SLOW_CLOCKS or clock.read_ns > CLOCK_READ_NS_MAX:
        advice = "use a faster clock source (tsc, kvm-clock, arch_sys_counter) if the machine has one"
        return _CLOCK.warning("monotonic clock", f"{found}: slow", advice)
    return _CLOCK.ok("monotonic clock", found)
