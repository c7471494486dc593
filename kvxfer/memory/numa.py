"""Which NUMA node is near: to this thread, to an accelerator; and threads that stay on one.

Facts come from sysfs. Each function takes the root of it, so that tests and `doctor` can hand in another, and answers
None where the machine does not tell: then nothing is bound, which is slower at most. What cannot be applied (containers
often forbid it) is said once and never an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvxfer.errors import ConfigError, UsageError
from kvxfer.logs import logger

SYSFS = Path("/sys")
ACCELERATOR_VENDOR = "0x19e5"
ACCELERATOR_CLASS = "0x12"  # processing accelerator
NODES_MAX = 1024
_LIST = re.compile(r"[0-9]{1,6}(-[0-9]{1,6})?(,[0-9]{1,6}(-[0-9]{1,6})?)*")

log = logger("kvxfer.numa")


def parse_list(text: str) -> tuple[int, ...]:
    """The kernel's form of a set of numbers: "0-3,8"; () for anything else."""
    numbers: set[int] = set()
    if not _LIST.fullmatch(text.strip()):
        return ()
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        numbers.update(range(int(low), int(high or low) + 1))
    return tuple(sorted(numbers))


def _read(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="ascii").strip()
    return ""


def nodes(root: Path = SYSFS) -> tuple[int, ...]:
    """The nodes of this host; () when it does not tell."""
    return parse_list(_read(root / "devices/system/node/online"))


def node_cpus(node: int, root: Path = SYSFS) -> tuple[int, ...]:
    """The CPUs of a node."""
    return parse_list(_read(root / f"devices/system/node/node{node}/cpulist"))


def cpu_node(cpu: int, root: Path = SYSFS) -> int | None:
    """The node that a CPU belongs to."""
    return next((node for node in nodes(root) if cpu in node_cpus(node, root)), None)


def this_cpu(proc: Path = Path("/proc")) -> int | None:
    """The CPU on which this thread ran last."""
    after_name = _read(proc / "thread-self/stat").rpartition(")")[2].split()
    return int(after_name[36]) if len(after_name) > 36 and after_name[36].isdigit() else None


def _node_of(device: Path) -> int | None:
    text = _read(device / "numa_node")
    return int(text) if text.isdigit() else None  # -1: the firmware does not say


def device_node(physical: int | None, root: Path = SYSFS) -> int | None:
    """The node of an accelerator by its number in the host; when only the nodes of all cards are known, that of all if
    it is one. Card numbers do not follow PCI addresses, so nothing is guessed from those.
    """
    if physical is not None:
        for link in sorted(root.glob(f"class/*/davinci{physical}/device")):
            node = _node_of(link)
            if node is not None:
                return node
    found = set()
    for device in sorted(root.glob("bus/pci/devices/*")):
        if _read(device / "vendor") == ACCELERATOR_VENDOR and _read(device / "class").startswith(ACCELERATOR_CLASS):
            found.add(_node_of(device))
    return found.pop() if len(found) == 1 else None


def choose(wanted: object, physical: int | None = None, *, on_device: bool = False, root: Path = SYSFS) -> int | None:
    """The node that memory shall lie on: ``wanted`` is None (any), a number, or "auto": that of the device if it has
    one and that is known, else that of the calling thread. Raises `UsageError` for a node that is not there.
    """
    if wanted is None:
        return None
    if wanted == "auto":
        near = device_node(physical, root) if on_device else None
        cpu = this_cpu()
        return near if near is not None or cpu is None else cpu_node(cpu, root)
    known = nodes(root)
    if not isinstance(wanted, int) or isinstance(wanted, bool) or not 0 <= wanted < NODES_MAX:
        raise UsageError('numa_node must be "auto", None or the number of a node', value=repr(wanted)[:40])
    if known and wanted not in known:
        listed = " ".join(str(node) for node in known)
        raise UsageError("this host has no such NUMA node", field="numa_node", value=wanted, nodes=listed)
    return wanted


@contextmanager
def threads_on(wanted: str, root: Path = SYSFS) -> Iterator[str]:
    """Threads that are started inside run on the CPUs of a node: "auto", a number, or "" for any. Yields what became of
    it: "none", "bound" or "not applied".
    """
    node = choose(int(wanted) if wanted.isdigit() else wanted or None, root=root)
    before = os.sched_getaffinity(0)
    wished = before & set(() if node is None else node_cpus(node, root))
    outcome = "none" if not wanted else "bound"
    if wanted:
        try:
            os.sched_setaffinity(0, wished)
        except OSError as denied:
            log.warning("the engine's threads are not bound to NUMA node %s: %s", wanted, denied.strerror)
            outcome = "not applied"
    try:
        yield outcome
    finally:
        if outcome == "bound":
            os.sched_setaffinity(0, before)


@contextmanager
def threads_at(wanted: str, root: Path = SYSFS) -> Iterator[None]:
    """Threads that are started inside run on these CPUs, wherever this one may: "0-3,8", "all" of the host that this
    process is allowed, or "" for those of this thread. Raises `ConfigError` for a CPU that is not there or not allowed.
    """
    before = os.sched_getaffinity(0)
    if not wanted:
        yield
        return
    online = set(parse_list(_read(root / "devices/system/cpu/online"))) or set(range(os.cpu_count() or 1))
    asked = online if wanted == "all" else set(parse_list(wanted))
    missing = asked - online
    try:
        if not missing:
            os.sched_setaffinity(0, asked)
            missing = set() if wanted == "all" else asked - os.sched_getaffinity(0)
    except OSError as denied:
        raise ConfigError(f"engine_cpus: {wanted} cannot be used: {denied.strerror}", option="engine_cpus") from denied
    try:
        if missing:
            first = min(missing)
            hint = "name CPUs of this host that the process is allowed (its cpuset), or all"
            raise ConfigError(f"engine_cpus: there is no CPU {first} for us", option="engine_cpus", hint=hint)
        yield
    finally:
        os.sched_setaffinity(0, before)
