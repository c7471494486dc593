"""Looking at a host that is a tree of files, and at this one."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from kvxfer.doctor.facts import Pages
from kvxfer.doctor.host import Tree, probe_host

GIB = 1 << 30


def plant(root: Path, files: dict[str, str]) -> Path:
    """Write files below a root."""
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


HOST = {
    "/proc/meminfo": "MemTotal:  16777216 kB\nMemAvailable:  8388608 kB\n",
    "/proc/self/status": "Name:\tx\nCapEff:\t0000000000004000\n",
    "/proc/sys/kernel/yama/ptrace_scope": "1\n",
    "/proc/sys/vm/max_map_count": "1048576\n",
    "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "10\n",
    "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "4\n",
    "/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages": "1\n",
    "/sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages": "0\n",
    "/sys/devices/system/node/node0/x": "",
    "/sys/devices/system/node/node1/x": "",
    "/sys/devices/system/node/possible": "0-1",
    "/sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet\n",
    "/sys/bus/pci/devices/0000:c1:00.0/vendor": "0x19e5\n",
    "/sys/bus/pci/devices/0000:c1:00.0/class": "0x120000\n",
    "/sys/bus/pci/devices/0000:c1:00.0/numa_node": "1\n",
    "/sys/bus/pci/devices/0000:00:00.0/vendor": "0x8086\n",
    "/sys/bus/pci/devices/0000:00:00.0/class": "0x060000\n",
}


def test_a_host_of_files(tmp_path: Path) -> None:
    host = probe_host(plant(tmp_path, HOST))
    assert (host.memory_total, host.memory_available) == (16 * GIB, 8 * GIB)
    assert host.capabilities == {"CAP_IPC_LOCK"}
    assert (host.ptrace_scope, host.maps_max, host.container_limit) == (1, 1048576, None)
    assert host.pages == (Pages(page_bytes=2 << 20, total=10, free=4), Pages(page_bytes=GIB, total=1, free=0))
    assert (host.numa.nodes, host.numa.cards) == ((0, 1), {"0000:c1:00.0": 1})
    assert host.clock.source == "hpet"


def test_a_host_that_tells_nothing(tmp_path: Path) -> None:
    host = probe_host(tmp_path)
    assert (host.ptrace_scope, host.pages, host.numa.nodes, host.container_limit) == (None, (), (0,), None)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {
                "/proc/self/cgroup": "0::/pod/box\n",
                "/sys/fs/cgroup/memory.max": "max\n",
                "/sys/fs/cgroup/pod/memory.max": "1000\n",
                "/sys/fs/cgroup/pod/memory.current": "10\n",
                "/sys/fs/cgroup/pod/box/memory.max": "2000\n",
                "/sys/fs/cgroup/pod/box/memory.current": "5\n",
            },
            (1000, 10),
        ),
        (
            {
                "/proc/self/cgroup": "4:memory:/pod\n3:cpu:/pod\n",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "/sys/fs/cgroup/memory/pod/memory.limit_in_bytes": "5000\n",
                "/sys/fs/cgroup/memory/pod/memory.usage_in_bytes": "7\n",
            },
            (5000, 7),
        ),
        (
            {
                "/proc/self/cgroup": "0::/../outside\n",
                "/sys/fs/cgroup/memory.max": "4000\n",
                "/sys/fs/cgroup/memory.current": "1\n",
            },
            (4000, 1),
        ),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.max": "max\n"}, (None, 0)),
    ],
)
def test_limits_of_containers(files: dict[str, str], expected: tuple[int | None, int], tmp_path: Path) -> None:
    host = probe_host(plant(tmp_path, files))
    assert (host.container_limit, host.container_used) == expected


def test_this_host() -> None:
    host = probe_host()
    assert host.memory_total >= host.memory_available > 0
    assert host.memfd_errno == 0
    assert host.attach_errno == 0, "the suite's own tests of cross-memory attach could not run"
    assert 0 < host.clock.read_ns < 1e6
    assert host.clock.backwards == 0
    assert (host.numa.mbind_errno is None) == (platform.machine() not in ("x86_64", "aarch64"))
    assert len(os.listdir("/proc/self/fd")) < 1000


def test_a_probe_leaves_no_descriptor_open() -> None:
    probe_host()
    before = len(os.listdir("/proc/self/fd"))
    probe_host()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_tree_reads_numbers_only(tmp_path: Path) -> None:
    tree = Tree(plant(tmp_path, {"/a": "12\n", "/b": "max\n", "/c": "-1"}))
    assert (tree.number("/a"), tree.number("/b"), tree.number("/c"), tree.number("/none")) == (12, None, -1, None)
