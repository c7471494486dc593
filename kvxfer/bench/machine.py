"""The machine that was measured on, in a few facts: without them a rate means nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _field(text: str, name: str) -> str:
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def memory_bytes(name: str = "MemTotal") -> int:
    """A number of /proc/meminfo in bytes, 0 when it is not there."""
    words = _field(_read("/proc/meminfo"), name).split()
    return int(words[0]) * 1024 if words else 0


def describe() -> dict[str, str]:
    """Facts by name, for people."""
    cpu = _read("/proc/cpuinfo")
    pages = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = pages.partition("[")[2].partition("]")[0] or "unknown"
    load = _read("/proc/loadavg").split()
    return {
        "CPU": _field(cpu, "model name") or platform.processor() or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory_bytes() / 2**30:.1f} GiB",
        "kernel": platform.release(),
        "tcp congestion control of the host": _read("/proc/sys/net/ipv4/tcp_congestion_control") or "unknown",
        "transparent hugepages": chosen,
        "Python": platform.python_version(),
        "event loop of both sides": f"uvloop {importlib.metadata.version('uvloop')}",
        "load when it began": load[0] if load else "unknown",
    }
