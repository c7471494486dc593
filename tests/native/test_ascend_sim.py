"""The simulated CANN libraries: what is built, ACL's memory and streams.

Sizes are asserted where the libraries are compiled (hixl.h, numbers.h). Links and transfers: test_ascend_sim_links.py.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.native.ascend_sim import build as building
from tests.native.ascend_sim.build import VARIANTS, NoCompilerError, build, made
from tests.native.ascend_sim.driven import (
    MEMORY_ERROR,
    MIB,
    NO_CONTEXT,
    NO_MEMORY,
    OK,
    PAGE,
    PARAM,
    Driver,
)
from tests.native.ascend_sim.simulation import Simulation


def words(text: str) -> list[str]:
    return text.split()


HIXL_BASE = words("""
_ZN4hixl4HixlC1Ev
_ZN4hixl4HixlD1Ev
_ZN4hixl4Hixl8FinalizeEv
_ZN4hixl4Hixl10InitializeERKN2ge12AscendStringERKSt3mapIS2_S2_St4lessIS2_ESaISt4pairIS3_S2_EEE
_ZN4hixl4Hixl11RegisterMemERKNS_7MemDescENS_7MemTypeERPv
_ZN4hixl4Hixl13DeregisterMemEPv
_ZN4hixl4Hixl7ConnectERKN2ge12AscendStringEi
_ZN4hixl4Hixl10DisconnectERKN2ge12AscendStringEi
_ZN4hixl4Hixl12TransferSyncERKN2ge12AscendStringENS_10TransferOpERKSt6vectorINS_14TransferOpDescESaIS7_EEi
_ZN4hixl4Hixl13TransferAsyncERKN2ge12AscendStringENS_10TransferOpERKSt6vectorINS_14TransferOpDescESaIS7_EERKNS_12Trans\
ferArgsERPv
_ZN4hixl4Hixl17GetTransferStatusERKPvRNS_14TransferStatusE
_ZN4hixl4Hixl10SendNotifyERKN2ge12AscendStringERKNS_10NotifyDescEi
_ZN4hixl4Hixl11GetNotifiesERSt6vectorINS_10NotifyDescESaIS2_EE
""")
HIXL_91 = words("""
_ZN4hixl4Hixl12ConnectAsyncERKN2ge12AscendStringEi
_ZN4hixl4Hixl15DisconnectAsyncERKN2ge12AscendStringEi
_ZN4hixl4Hixl21GetAsyncConnectStatusERKN2ge12AscendStringERNS_18AsyncConnectStatusE
_ZN4hixl4Hixl21GetAsyncConnectStatusERSt3mapIN2ge12AscendStringENS_18AsyncConnectStatusESt4lessIS3_ESaISt4pairIKS3_S4_\
EEE
_ZN4hixl4Hixl17GetTransferStatusERKNS_21GetTransferStatusArgsERSt6vectorINS_14TransferResultESaIS5_EE
_ZN4hixl4Hixl13GetCapabilityENS_11FeatureTypeERi
""")
STRINGS = words("""
_ZN2ge12AscendStringC1EPKc _ZN2ge12AscendStringC1EPKcm _ZNK2ge12AscendString9GetStringEv
_ZNK2ge12AscendString9GetLengthEv _ZNK2ge12AscendStringltERKS0_ _ZNK2ge12AscendStringgtERKS0_
_ZNK2ge12AscendStringleERKS0_ _ZNK2ge12AscendStringgeERKS0_ _ZNK2ge12AscendStringeqERKS0_ _ZNK2ge12AscendStringneERKS0_
""")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as held:
        yield held


@pytest.fixture
def sim(tmp_path: Path) -> Simulation:
    return Simulation(tmp_path / "sim", settings={"HBM": "64M"})


# -- what is built ----------------------------------------------------------------------------------------------------


def symbols(library: Path, *what: str) -> list[str]:
    listed = subprocess.run(["nm", "-D", *what, str(library)], capture_output=True, text=True, check=True)
    return [line.split()[-1] for line in listed.stdout.splitlines()]


@pytest.mark.parametrize("abi", [0, 1])
@pytest.mark.parametrize("variant", VARIANTS)
def test_exported_names_are_the_vendors(variant: str, abi: int) -> None:
    libraries = build(variant, abi)
    wanted = HIXL_BASE + (["HixlCSServerCreate"] if variant != "8.5" else []) + (HIXL_91 if variant == "9.1" else [])
    assert sorted(symbols(libraries / "libcann_hixl.so", "--defined-only")) == sorted(wanted)
    assert sorted(symbols(libraries / "libmetadef.so", "--defined-only")) == sorted(STRINGS)
    acl = symbols(libraries / "libacl_rt.so", "--defined-only")
    assert ("aclrtMemGetAddressRange" in acl) == (variant == "9.1")
    assert "aclrtMemcpyBatchAsync" in acl
    assert (libraries / "libascendcl.so").samefile(libraries / "libacl_rt.so")


@pytest.mark.parametrize("abi", [0, 1])
def test_string_abi_and_needed_libraries(abi: int) -> None:
    libraries = build("9.1", abi)
    strings = [name for name in symbols(libraries / "libcann_hixl.so", "--undefined-only") if "basic_string" in name]
    assert strings or abi == 0
    assert any("__cxx11" in name for name in strings) == (abi == 1)
    listed = subprocess.run(["readelf", "-d", str(libraries / "libcann_hixl.so")], capture_output=True, text=True)
    for name in ("libacl_rt.so", "libmetadef.so", "libhcomm.so", "liberror_manager.so"):
        assert f"(NEEDED)             Shared library: [{name}]" in listed.stdout
    assert "Library soname: [libcann_hixl.so]" in listed.stdout


def test_a_missing_compiler_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    building.compiler.cache_clear()
    try:
        with pytest.raises(NoCompilerError, match=r"apt-get install g\+\+"):
            build("9.1", 1)
    finally:
        building.compiler.cache_clear()


def test_builders_at_once_build_once(tmp_path: Path) -> None:
    calls: list[Path] = []
    results: list[Path] = []

    def work(directory: Path) -> None:
        calls.append(directory)
        time.sleep(0.05)
        (directory / "made").write_text("x")

    def one() -> None:
        results.append(made(tmp_path / "family", ["x"], work))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(set(results)) == 1
    assert (results[0] / "made").exists()
    assert not list((tmp_path / "family").glob(".work-*"))


# -- ACL: devices and memory ------------------------------------------------------------------------------------------


@pytest.fixture
def one(stack: ExitStack, sim: Simulation) -> Driver:
    driver = Driver(sim)
    stack.callback(driver.close)
    driver.good("init", "device 0")
    return driver


def test_it_says_what_it_is(stack: ExitStack, sim: Simulation) -> None:
    driver = Driver(sim)
    stack.callback(driver.close)
    assert driver("soc") == ["0", "KVXSim910", "9.1.0-KVXSim910"]
    assert driver("device 0") == ["100001"]
    assert "KVXSim910 (simulated)" in driver.line("message")
    assert driver.line("message") == "-"  # told once
    assert [driver("init"), driver("init")] == [["0"], ["100002"]]
    assert driver("malloc m 4096")[0] == NO_CONTEXT
    assert driver("open e 127.0.0.1:1") == [NO_CONTEXT]
    assert driver("device 2") == ["107001"]
    assert driver("devices") == ["0", "2"]
    assert driver("device 1") == [OK]
    assert driver("getdevice") == ["0", "1"]
    assert any("no hardware" in line for line in sim.log())


def test_device_memory_is_counted_and_runs_out(one: Driver, stack: ExitStack, sim: Simulation) -> None:
    other = Driver(sim, HBM="9G")  # the first process of a simulation decides
    stack.callback(other.close)
    other.good("init", "device 0")
    assert other("meminfo") == ["0", str(64 * MIB), str(64 * MIB)]
    one.good("malloc a 1", f"malloc b {40 * MIB}")
    assert other("meminfo") == ["0", str(22 * MIB), str(64 * MIB)]
    assert other.status(f"malloc c {24 * MIB}") == NO_MEMORY
    assert int(one("range a")[1]) % PAGE == 0
    assert one("range a")[2] == str(PAGE)
    assert int(one("malloc n 4096 2")[1]) % PAGE != 0  # small pages are never aligned by luck
    one.kill()
    assert other("meminfo")[1] == str(64 * MIB)  # a dead process gives its memory back
    other.good(f"malloc c {60 * MIB}", "free c", f"malloc c {60 * MIB}")
    assert sim.faults() == []


def test_whose_memory_it_is(one: Driver) -> None:
    one.good(f"malloc d {PAGE}", "mallochost h 8192", "plain p 8192")
    assert one("where d+100") == ["0", "1", "0"]
    assert one("where h+8191")[:2] == ["0", "0"]
    assert one("where p")[:2] == ["0", "2"]
    one.good("pin p 8192")
    assert one("where p")[:2] == ["0", "0"]
    assert one.status("pin p 8192") == PARAM
    one.good("unpin p", "free d")
    assert one("where d")[:2] == ["0", "2"]


def test_a_processor_that_touches_device_memory_dies(one: Driver) -> None:
    one.good(f"malloc d {PAGE}")
    with pytest.raises(EOFError, match=f"ended with -{signal.SIGSEGV.value}"):
        one("touch d")


def test_copies_go_everywhere_and_are_checked(one: Driver, sim: Simulation) -> None:
    one.good(f"malloc d {PAGE}", "mallochost h 65536", "plain p 65536", f"fill d {PAGE} 7")
    one.good("copy h d 65536", "copy p h 65536 0", "copy p d 65536 2", "copy d p 65536 1", "copy d+65536 d 65536 3")
    assert one("count p 65536 7") == ["0", "65536"]
    assert one.status("copy d p 65536 2") == PARAM  # the kind is wrong
    assert sim.faults() == []
    assert one.status(f"copy p d+{PAGE - 4096} 8192") == MEMORY_ERROR
    assert one.status(f"copy p d+{PAGE} 4096") == MEMORY_ERROR
    one.good("free d")
    assert one.status("copy p d 4096") == MEMORY_ERROR
    assert one.status("free d") == "207002"
    for text in ("out of its allocation's range", "no live allocation", "use after free", "free of .* not the start"):
        assert len(sim.faults(text)) == 1, text


def test_strict_ends_the_process(one: Driver, sim: Simulation) -> None:
    sim.control(STRICT="abort")
    with pytest.raises(EOFError, match=f"ended with -{signal.SIGABRT.value}"):
        one("free 4096")
    assert len(sim.faults()) == 1


def test_other_cards_need_peer_access(one: Driver, sim: Simulation) -> None:
    one.good(f"malloc d0 {PAGE}", "device 1", f"malloc d1 {PAGE}")
    assert one.status("copy d1 d0 4096") == PARAM
    assert one("peer 0 1") == ["0", "1"]
    assert one.status("peer 0 0") == PARAM
    one.good("enablepeer 0", "copy d1 d0 4096")
    sim.control(PEER=0)
    assert one("peer 0 1") == ["0", "0"]


def test_streams_events_and_abort(one: Driver, sim: Simulation) -> None:
    one.good(f"malloc d {4 * PAGE}", f"fill d {PAGE} 3", "stream s", "event v")
    sim.control(STALL=1)
    one.good(f"batch s d+{PAGE} d 512 4096", "record v s")
    assert one.status(f"batch s d+{PAGE} d 512 4097") == PARAM
    assert one("streamquery s") == ["0", "1"]
    assert one("eventquery v") == ["0", "0"]
    assert one.status("streamwait s 20") == "507046"
    one.good("streamabort s")
    assert one("streamquery s") == ["0", "0"]
    sim.control()
    assert one(f"count d+{PAGE} {PAGE} 3") == ["0", "0"]  # nothing had moved and nothing will
    one.good(f"batch s d+{PAGE} d 512 4096", "record v s", "streamwait s 5000")
    assert one("eventquery v") == ["0", "1"]
    assert one(f"count d+{PAGE} {PAGE} 3") == ["0", str(PAGE)]
    one.good(f"copyasync s d+{2 * PAGE} d {PAGE}", "streamclose s")
    assert one(f"count d+{2 * PAGE} {PAGE} 3") == ["0", str(PAGE)]
    assert one.status("streamquery s") == "107003"


def test_ipc_memory(one: Driver, stack: ExitStack, sim: Simulation) -> None:
    other = Driver(sim)
    stack.callback(other.close)
    other.good("init", "device 1")
    one.good(f"malloc d {PAGE}", f"fill d {PAGE} 5")
    key = one(f"export d {PAGE} 0")[1]
    assert one.status(f"export d+4096 {PAGE - 4096} 0") == PARAM
    assert other.status(f"import x {key} 1") == PARAM  # the owner has not named this process
    one.good(f"allow {key} {other.pid}")
    assert other.status(f"import x {key} 0") == PARAM  # another card: needs peer access
    other.good(f"import x {key} 1", f"malloc y {PAGE}", "enablepeer 0", f"copy y x {PAGE}")
    assert other(f"count y {PAGE} 5") == ["0", str(PAGE)]
    assert other("where x") == ["0", "1", "0"]
    one.good("free d")
    assert len(sim.faults("another process has it imported")) == 1
    assert other.status("copy y x 4096") == MEMORY_ERROR
    assert len(sim.faults("freed by its owner")) == 1
    other.good(f"ipcclose {key}")
