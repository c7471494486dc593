"""Judgements about hosts that are made up: each limit just met, just missed, and what is said then."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from kvxfer.config import Config
from kvxfer.doctor.facts import UNLIMITED, Clock, Finding, FindingState, Host, Numa, Pages
from kvxfer.doctor.host import judge_host, wanted_bytes

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PLENTY: dict[str, Any] = {"memory_total": 64 * GIB, "memory_available": 32 * GIB}


def found(check: str, config: Config | None = None, **host: Any) -> Finding:
    findings = list(judge_host(Host(**(PLENTY | host)), config or Config()))
    [finding] = [finding for finding in findings if finding.check == check]
    return finding


def test_a_good_host_has_no_complaints() -> None:
    pages = (Pages(page_bytes=2 * MIB, total=512, free=512),)
    findings = list(judge_host(Host(pages=pages, **PLENTY), Config()))
    assert {finding.state for finding in findings} == {FindingState.OK}
    assert all(finding.group in ("memory", "limits", "clock") for finding in findings)


def test_locked_memory_names_limit_amount_and_remedy() -> None:
    low = found("locked memory", memlock=(64 * KIB, 128 * KIB))
    assert low.state is FindingState.WARNING
    for word in ("ulimit -l", "64 KiB", "128 KiB", "256 MiB"):
        assert word in low.found
    for word in ("LimitMEMLOCK", "--ulimit memlock", "shm and tcp on ordinary pages do not lock any"):
        assert word in low.advice


@pytest.mark.parametrize(
    "host",
    [
        {"memlock": (UNLIMITED, UNLIMITED)},
        {"memlock": (256 * MIB, 256 * MIB)},
        {"memlock": (64 * KIB, 64 * KIB), "capabilities": frozenset({"CAP_IPC_LOCK"})},
    ],
)
def test_enough_locked_memory(host: dict[str, Any]) -> None:
    assert found("locked memory", **host).state is FindingState.OK


@pytest.mark.parametrize(
    ("pages", "state"),
    [
        ((), FindingState.NOT_HERE),
        ((Pages(page_bytes=2 * MIB, total=0, free=0),), FindingState.NOT_HERE),
        ((Pages(page_bytes=2 * MIB, total=128, free=128),), FindingState.OK),
        ((Pages(page_bytes=2 * MIB, total=200, free=127),), FindingState.WARNING),
    ],
)
def test_hugepages(pages: tuple[Pages, ...], state: FindingState) -> None:
    finding = found("hugepages", pages=pages)
    assert finding.state is state
    if state is not FindingState.OK:
        assert "128" in finding.advice  # 256 MiB of 2 MiB pages


def test_hugepages_that_nobody_wants() -> None:
    finding = found("hugepages", Config(hugepages=False))
    assert (finding.state, "turned off" in finding.found) == (FindingState.NOT_HERE, True)


def test_shared_memory() -> None:
    assert "does not use" in found("shared memory", tmpfs_bytes=64 * MIB).found
    denied = found("shared memory", memfd_errno=errno.EPERM)
    assert (denied.state, "EPERM" in denied.found) == (FindingState.PROBLEM, True)


def test_headroom_of_a_host() -> None:
    need = wanted_bytes(Config())
    assert found("headroom", memory_available=int(need / 0.7) + MIB).state is FindingState.OK
    tight = found("headroom", memory_available=int(need / 0.7) - MIB)
    assert (tight.state, "30%" in tight.advice) == (FindingState.WARNING, True)
    assert found("headroom", memory_available=need - 1).state is FindingState.PROBLEM


def test_headroom_of_a_container() -> None:
    limited = found("headroom", container_limit=512 * MIB, container_used=256 * MIB)
    assert limited.state is FindingState.PROBLEM
    assert "256 MiB free under the limit of the container" in limited.found
    assert "raise the limit" in limited.advice
    assert "lower landing_bytes_max to" in limited.advice
    full = found("headroom", container_limit=MIB, container_used=2 * MIB)
    assert "0 bytes free" in full.found


def test_a_landing_pool_as_small_as_advised_has_headroom() -> None:
    free = 700 * MIB
    advice = found("headroom", Config(landing_bytes_max=8 * GIB), memory_available=free).advice
    advised = advice.partition("landing_bytes_max to ")[2].partition(",")[0].replace(" ", "")
    assert found("headroom", Config(landing_bytes_max=advised), memory_available=free).state is FindingState.OK  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("host", "state", "word"),
    [
        ({"ptrace_scope": 0}, FindingState.OK, "not restricted"),
        ({"ptrace_scope": None}, FindingState.OK, "not restricted"),
        ({"ptrace_scope": 1}, FindingState.WARNING, "parents and children only"),
        ({"ptrace_scope": 2}, FindingState.WARNING, "CAP_SYS_PTRACE only"),
        ({"ptrace_scope": 3}, FindingState.WARNING, "nobody"),
        ({"ptrace_scope": 1, "capabilities": frozenset({"CAP_SYS_PTRACE"})}, FindingState.OK, "CAP_SYS_PTRACE"),
        ({"attach_errno": errno.EPERM}, FindingState.WARNING, "EPERM"),
        ({"attach_errno": errno.ENOSYS}, FindingState.WARNING, "ENOSYS"),
    ],
)
def test_cross_memory_attach(host: dict[str, Any], state: FindingState, word: str) -> None:
    finding = found("cross-memory attach", **host)
    assert (finding.state, word in finding.found) == (state, True), finding
    assert ("by tcp" in finding.advice) == (state is FindingState.WARNING)


def test_numa() -> None:
    assert found("numa").state is FindingState.OK
    denied = found("numa", numa=Numa(nodes=(0, 1), mbind_errno=errno.EPERM, cards={"0000:c1:00.0": 1}))
    assert denied.state is FindingState.WARNING
    assert "NUMA policy not applied (mbind: EPERM)" in denied.found
    assert "accelerators on node 1" in denied.found
    assert found("numa", numa=Numa(nodes=(0,), mbind_errno=errno.EPERM)).state is FindingState.OK
    assert found("numa", numa=Numa(nodes=(0, 1), mbind_errno=0)).state is FindingState.OK


@pytest.mark.parametrize(
    ("limit", "state"),
    [
        ((UNLIMITED, UNLIMITED), FindingState.OK),
        ((6144, 6144), FindingState.OK),
        ((6143, 65536), FindingState.WARNING),
        ((255, 255), FindingState.PROBLEM),
    ],
)
def test_open_files(limit: tuple[int, int], state: FindingState) -> None:
    assert found("open files", descriptors=limit).state is state


def test_memory_maps() -> None:
    assert found("memory maps", maps_max=8192).state is FindingState.OK
    assert found("memory maps", maps_max=8191).state is FindingState.WARNING


@pytest.mark.parametrize(
    ("clock", "state"),
    [
        (Clock(), FindingState.OK),
        (Clock(source="arch_sys_counter"), FindingState.OK),
        (Clock(source="hpet"), FindingState.WARNING),
        (Clock(read_ns=2001), FindingState.WARNING),
        (Clock(backwards=1), FindingState.PROBLEM),
    ],
)
def test_clocks(clock: Clock, state: FindingState) -> None:
    assert found("monotonic clock", clock=clock).state is state
