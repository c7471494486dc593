"""The simulated HIXL does what is known of the vendor's: statuses, latches, hangs, limits, the freeze."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.native.ascend_sim.driven import (
    ALREADY,
    COMPLETED,
    ENDED,
    EXHAUSTED,
    FAILED,
    INVALID,
    LIMIT_S,
    LOST,
    MIB,
    NO_MEMORY,
    NOT_CONNECTED,
    OK,
    PAGE,
    TIMEOUT,
    UNSUPPORTED,
    WAITING,
    Driver,
    Engine,
    Pair,
    free_port,
)
from tests.native.ascend_sim.simulation import Simulation


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as held:
        yield held


@pytest.fixture
def sim(tmp_path: Path) -> Simulation:
    return Simulation(tmp_path / "sim", settings={"HBM": "64M"})


@pytest.fixture
def pair(stack: ExitStack, sim: Simulation) -> Pair:
    return Pair(stack, sim)


# -- HIXL: links and transfers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "library_abi", "caller_abi"),
    [("9.1", 0, 1), ("9.1", 1, 0), ("9.1", 0, 0), ("9.0", 1, 1), ("8.5", 0, 1)],
)
def test_bytes_move_between_processes(
    stack: ExitStack, tmp_path: Path, variant: str, library_abi: int, caller_abi: int
) -> None:
    sim = Simulation(tmp_path / "sim", variant=variant, abi=library_abi, settings={"HBM": "64M"})
    pair = Pair(stack, sim, caller_abi)
    assert pair.sync("w", 2 * PAGE) == OK
    assert pair.b(f"count m {2 * PAGE} 10") == ["0", str(2 * PAGE)]
    pair.b.good(f"fill m {PAGE} 77")
    assert pair.submit("q", PAGE, "r") == OK
    assert pair.finish("q") == [OK, COMPLETED]
    assert pair.a(f"count m {PAGE} 77") == ["0", str(PAGE)]
    assert pair.a("poll e q") == [INVALID, ENDED]  # the poll that saw the end freed it
    pair.a.good(f"sync e {pair.b.name} w 1000 h {pair.b.host} 65536 m {pair.b.host + 4096} 4096")
    assert pair.b("count h 65536 20") == ["0", "61440"]
    assert pair.b("count h+4096 4096 77") == ["0", "4096"]
    pair.a.good(f"scatter e q {pair.b.name} w m {pair.b.memory} 512 4096")
    assert pair.finish("q") == [OK, COMPLETED]
    pair.a.good(f"notify e {pair.b.name} 1000 3 1024")
    assert pair.b("notifies e") == ["0", "1", "1024"]
    assert pair.b("notifies e") == ["0", "0", "0"]
    pair.a.good(f"disconnect e {pair.b.name}", "close e")
    pair.b.good("deregister e rm", "close e")
    assert sim.faults() == []


def test_initialise_and_its_options(stack: ExitStack, tmp_path: Path) -> None:
    for variant, auto in (("8.5", INVALID), ("9.0", OK)):
        sim = Simulation(tmp_path / variant, variant=variant, settings={"HBM": "128M"})
        driver = Driver(sim)
        stack.callback(driver.close)
        driver.good("init", "device 0")
        assert driver.status(f"open x 127.0.0.1:{free_port()} BufferPool=0:0 AutoConnect=1") == auto
        for bad in (
            "Nonsense=1",
            "RdmaTrafficClass=131",
            "RdmaServiceLevel=8",
            "BufferPool=x",
            "GlobalResourceConfig=3",
        ):
            assert driver.status(f"open y 127.0.0.1 {bad}") == INVALID, bad
        assert driver.status("open y nonsense BufferPool=0:0") == INVALID
        assert driver.status("open y 127.0.0.1 EnableUseFabricMem=1") == UNSUPPORTED
        driver.good("open c0 127.0.0.1:0 BufferPool=0:0", "open c1 127.0.0.1:-1 BufferPool=0:0")
        driver.good("open c2 [::1] BufferPool=0:0 RdmaTrafficClass=132 RdmaServiceLevel=4")
        assert driver("meminfo")[1] == str(128 * MIB)
        driver.good("open c3 127.0.0.1")
        assert driver("meminfo")[1] == str(64 * MIB)  # the default BufferPool is not free
        taken = free_port()
        driver.good(f"open c4 127.0.0.1:{taken} BufferPool=0:0")
        assert driver.status(f"open c5 127.0.0.1:{taken} BufferPool=0:0") == FAILED


def test_registration(pair: Pair) -> None:
    a = pair.a
    first = a(f"register e again m {2 * PAGE} 0")
    assert first[0] == OK
    assert a(f"register e again m {2 * PAGE} 0") == first
    a.good("plain p 65536", "pin p 65536")
    assert a.status("register e rp p 65536 1") == FAILED  # not from aclrtMallocHost
    assert a.status("register e rp m 0 0") == INVALID
    assert a.status(f"register e rp m {3 * PAGE} 0") == INVALID  # more than the allocation
    assert a.status("deregister e 0") == INVALID
    assert a.status("deregister e 12345") == OK
    assert a.status("deregister e rm") == FAILED
    assert pair.b.status("deregister e rm") == FAILED
    a.good(f"disconnect e {pair.b.name}", "deregister e rm", "deregister e rm")
    pair.b.good("deregister e rm", "deregister e rh")
    a.good("free m")
    assert pair.sim.faults() == []
    a.good("freehost h")
    assert len(pair.sim.faults("while it is registered")) == 1


def test_connect_is_refused(pair: Pair, stack: ExitStack) -> None:
    a, b = pair.a, pair.b
    assert a.status(f"connect e {b.name}") == ALREADY
    assert a.status(f"connect e {a.name}") == FAILED
    assert a.status(f"connect e 127.0.0.1:{free_port()}") == FAILED  # nobody there: at once, no timeout
    assert a.status("connect e 127.0.0.1") == INVALID
    assert a.status(f"connect e {b.name} 0") == INVALID
    same = Engine(pair.sim, 1)
    stack.callback(same.close)
    assert same.status(f"connect e {b.name}") == FAILED
    assert "same device" in same.line("message")
    same.good("device 0", "open pools 127.0.0.1:0 BufferPool=1:1")
    assert same.status(f"connect pools {b.name}") == FAILED
    assert "BufferPool" in same.line("message")
    assert a.status(f"disconnect e {same.name}") == NOT_CONNECTED
    assert a.status(f"sync e {same.name} w 1000 m {same.memory} 4096") == NOT_CONNECTED
    assert b.status(f"sync e {a.name} w 1000 m {a.memory} 4096") == NOT_CONNECTED  # links have a direction
    b.good(f"connect e {a.name}", f"sync e {a.name} w 1000 m {a.memory} 4096")


def test_alignment_is_noticed_at_connect(pair: Pair) -> None:
    a, b = pair.a, pair.b
    a.good(f"disconnect e {b.name}", "malloc n 8192 2", "register e rn n 8192 0")
    assert a.status(f"connect e {b.name}") == FAILED
    assert "2 MiB" in a.line("message")
    a.good("deregister e rn", f"register e rn m+4096 {PAGE} 0")
    assert a.status(f"connect e {b.name}") == FAILED
    a.good("deregister e rn", f"connect e {b.name}", f"disconnect e {b.name}")
    b.good("malloc n 8192 2", "register e rn n 8192 0")
    assert a.status(f"connect e {b.name}") == FAILED


def test_regions_that_fit_one_exchange(pair: Pair) -> None:
    a = pair.a
    pair.sim.control(REGIONS=4)
    a.good("mallochost x 65536", *(f"register e r{at} x+{at * 4096} 4096 1" for at in range(2)))
    pair.again()
    a.good(f"disconnect e {pair.b.name}", "register e r3 x+16384 4096 1")
    assert a.status(f"connect e {pair.b.name}") == FAILED
    assert "exchange" in a.line("message")


def test_bad_transfers(pair: Pair) -> None:
    a, b = pair.a, pair.b
    assert a.status(f"sync e {b.name} w 1000") == INVALID
    assert a.status(f"async e q {b.name} w") == INVALID
    assert pair.sync(timeout_ms=0) == INVALID
    assert pair.sync() == OK  # none of these latched the link
    later = int(b(f"malloc later {PAGE}")[1])
    b.good(f"register e rl later {PAGE} 0")
    assert a.status(f"sync e {b.name} w 1000 m {later} 4096") == FAILED  # registered after Connect: unreachable
    assert len(pair.sim.faults("was not registered by")) == 1
    assert pair.sync() == FAILED
    assert pair.submit("q") == FAILED
    a.good(f"notify e {b.name} 1000 1 1")  # that one not
    pair.again()
    a.good(f"sync e {b.name} w 1000 m {later} 4096")
    assert a.status(f"sync e {b.name} w 1000 m {b.memory + PAGE} {2 * PAGE}") == FAILED  # beyond the end


def test_permissive_ranges_write_where_they_should_not(pair: Pair) -> None:
    a, b = pair.a, pair.b
    innocent = int(b(f"malloc innocent {PAGE}")[1])
    b.good(f"fill innocent {PAGE} 1")
    pair.sim.control(RANGE="permissive")
    a.good(f"sync e {b.name} w 1000 m {innocent} 4096")
    assert b("count innocent 4096 10") == ["0", "4096"]
    b.good("free innocent")
    assert a.status(f"sync e {b.name} w 1000 m {innocent} 4096") == FAILED


def test_timeout_latches_and_the_bytes_still_move(pair: Pair) -> None:
    pair.sim.control(STALL=1)
    assert pair.sync("w", PAGE, 30) == TIMEOUT
    assert pair.submit("q") == FAILED  # latched although the stream is healthy
    assert pair.b(f"count m {PAGE} 10") == ["0", "0"]
    pair.sim.control()
    until = time.monotonic() + LIMIT_S
    while pair.b(f"count m {PAGE} 10") != ["0", str(PAGE)]:
        assert time.monotonic() < until, "what had timed out did not go on"
    pair.again()
    assert pair.sync() == OK


def test_disconnect_ends_what_moves(pair: Pair) -> None:
    pair.sim.control(GBPS=0.001)  # a megabyte a second
    assert pair.submit("q", 2 * PAGE) == OK
    until = time.monotonic() + LIMIT_S
    while pair.b("count m 4096 10") != ["0", "4096"]:
        assert time.monotonic() < until
    assert pair.a("poll e q") == [OK, WAITING]
    pair.a.good(f"disconnect e {pair.b.name}")
    moved = int(pair.b(f"count m {2 * PAGE} 10")[1])
    assert 4096 <= moved < 2 * PAGE  # half-done is really half-done
    assert pair.a("poll e q") == [NOT_CONNECTED, ENDED]
    assert pair.a("poll e q") == [INVALID, ENDED]
    time.sleep(0.05)
    assert pair.b(f"count m {2 * PAGE} 10") == ["0", str(moved)]


def test_8_5_does_not_latch(stack: ExitStack, tmp_path: Path) -> None:
    pair = Pair(
        stack, Simulation(tmp_path / "sim", variant="8.5", abi=0, settings={"HBM": "64M"}), fail="sync:1:503900"
    )
    assert [pair.sync(), pair.sync()] == [FAILED, OK]


def test_slots_and_the_poll_behind_a_sync(pair: Pair) -> None:
    pair.sim.control(SLOTS=2, STALL=1)
    assert [pair.submit(name) for name in ("q0", "q1", "q2")] == [OK, OK, EXHAUSTED]
    assert pair.a("poll e q0") == [OK, WAITING]
    pair.sim.control(SLOTS=3)
    assert pair.finish("q0") == [OK, COMPLETED]
    assert pair.submit("q2") == OK
    assert pair.finish("q1") == [OK, COMPLETED]
    assert pair.finish("q2") == [OK, COMPLETED]
    pair.sim.control(STALL=1)
    assert pair.submit("q0") == OK
    sync = pair.a.line(f"& sync e {pair.b.name} w 5000 m {pair.b.memory} 4096")
    assert pair.a.line(f"wait {sync} 30") == "running"
    poll = pair.a.line("& poll e q0")
    assert pair.a.line(f"wait {poll} 50") == "running"  # the same mutex
    pair.sim.control()
    assert pair.a.line(f"wait {sync} 5000") == OK
    assert pair.a.line(f"wait {poll} 5000") in (f"{OK} {WAITING}", f"{OK} {COMPLETED}")


def test_a_freed_buffer_that_is_still_written_to(pair: Pair) -> None:
    pair.sim.control(GBPS=0.001)
    assert pair.submit("q", 2 * PAGE) == OK
    pair.b.good("free m")
    assert pair.finish("q") == [FAILED, ENDED]
    assert len(pair.sim.faults("its target was freed while it ran")) == 1


def test_killed_peer(pair: Pair) -> None:
    port = int(pair.b.name.rsplit(":", 1)[1])
    pair.b.kill()
    assert pair.submit("q") == OK
    assert pair.finish("q") == [FAILED, ENDED]
    assert pair.sync() == FAILED
    assert pair.sync() == FAILED
    assert pair.a.status(f"disconnect e {pair.b.name}") == OK
    assert pair.a.status(f"connect e {pair.b.name}") == FAILED
    with ExitStack() as stack:
        back = Engine(pair.sim, 1, port=port)  # restarted on the same port
        stack.callback(back.close)
        pair.a.good(f"connect e {back.name}", f"sync e {back.name} w 1000 m {back.memory} {PAGE}")
        assert back(f"count m {PAGE} 10") == ["0", str(PAGE)]


def test_killed_initiator_stops(pair: Pair) -> None:
    pair.sim.control(GBPS=0.001)
    assert pair.submit("q", 2 * PAGE) == OK
    pair.a.kill()
    moved = pair.b(f"count m {2 * PAGE} 10")
    time.sleep(0.05)
    assert pair.b(f"count m {2 * PAGE} 10") == moved
    until = time.monotonic() + LIMIT_S
    while pair.b.status("deregister e rm") != OK:  # its link goes when the kernel closes the connection
        assert time.monotonic() < until


def test_stopped_peer_blocks_connect_and_disconnect_without_a_bound(pair: Pair) -> None:
    pair.b.signal(signal.SIGSTOP)
    assert pair.sync() == OK  # one-sided
    assert pair.a.status(f"notify e {pair.b.name} 50 1 1") == TIMEOUT
    ending = pair.a.line(f"& disconnect e {pair.b.name} 50")
    assert pair.a.line(f"wait {ending} 300") == "running"
    assert pair.sync() == NOT_CONNECTED  # the local link is gone already
    connecting = pair.a.line(f"& connect e {pair.b.name} 50")
    assert pair.a.line(f"wait {connecting} 300") == "running"
    pair.b.signal(signal.SIGCONT)
    assert pair.a.line(f"wait {ending} 5000") == OK
    assert pair.a.line(f"wait {connecting} 5000") == OK
    assert pair.sync() == OK


def test_silent_connections_freeze_the_listener(pair: Pair) -> None:
    address = ("127.0.0.1", int(pair.b.name.rsplit(":", 1)[1]))
    pair.a.good(f"disconnect e {pair.b.name}")
    with ExitStack() as held:
        for _ in range(8):
            held.enter_context(socket.create_connection(address))
        pair.a.good(f"connect e {pair.b.name}", f"disconnect e {pair.b.name}")
        last = [held.enter_context(socket.create_connection(address)) for _ in range(8)]
        connecting = pair.a.line(f"& connect e {pair.b.name} 50")
        assert pair.a.line(f"wait {connecting} 300") == "running"
        last[0].close()
        assert pair.a.line(f"wait {connecting} 5000") == OK


def test_a_link_that_is_silent_is_dropped_by_the_server(stack: ExitStack, tmp_path: Path) -> None:
    settings = {"HBM": "64M", "HEARTBEAT_MS": "20", "HEARTBEAT_DROP_MS": "400"}
    pair = Pair(stack, Simulation(tmp_path / "sim", settings=settings))
    time.sleep(0.6)
    assert pair.b.status("deregister e rm") == FAILED  # beats keep it
    pair.a.signal(signal.SIGSTOP)
    until = time.monotonic() + LIMIT_S
    while pair.b.status("deregister e rm") != OK:
        assert time.monotonic() < until
    pair.a.signal(signal.SIGCONT)
    assert pair.sync() == FAILED


def test_notify_limits(pair: Pair) -> None:
    assert pair.a.status(f"notify e {pair.b.name} 1000 1025 1") == INVALID
    assert pair.a.status(f"notify e {pair.b.name} 1000 1 1025") == INVALID
    assert pair.a.status(f"notify e {pair.b.name} 0 1 1") == INVALID
    for _ in range(4096):
        pair.a.good(f"notify e {pair.b.name} 1000 1 1")
    assert pair.a.status(f"notify e {pair.b.name} 1000 1 1") == EXHAUSTED
    assert pair.b("notifies e")[:2] == ["0", "4096"]
    pair.a.good(f"notify e {pair.b.name} 1000 1 1")


def test_what_9_1_adds(pair: Pair) -> None:
    a, b = pair.a, pair.b
    assert a("bulk e") == [UNSUPPORTED]
    assert a("capability 0") == ["0", "1"]
    assert a("capability 1") == ["0", "0"]
    assert a.status("capability 7") == INVALID
    assert a(f"later e up {b.name}") == [ALREADY]
    for way, reached in (("down", "0"), ("up", "3")):
        a.good(f"later e {way} {b.name}")
        until = time.monotonic() + LIMIT_S
        while a(f"state e {b.name}") != ["0", reached, "1"]:
            assert time.monotonic() < until
    assert pair.sync() == OK
    nobody = f"127.0.0.1:{free_port()}"
    a.good(f"later e up {nobody}")
    until = time.monotonic() + LIMIT_S
    while a(f"state e {nobody}") != ["0", "4", "1"]:
        assert time.monotonic() < until


def test_auto_connect(stack: ExitStack, sim: Simulation) -> None:
    b = Engine(sim, 1)
    stack.callback(b.close)
    a = Engine(sim, 0, options="AutoConnect=1")
    stack.callback(a.close)
    write = f"sync e {b.name} w 1000 m {b.memory} 4096"
    a.good(write)
    b.kill()
    assert [a.status(write), a.status(write), a.status(write)] == [FAILED, FAILED, NOT_CONNECTED]


# -- faults on order --------------------------------------------------------------------------------------------------


def test_injected_statuses(pair: Pair) -> None:
    pair.sim.control(pair.a.pid, FAIL="sync:2:507899,transfer:3:507056,malloc:*:207001")
    assert [pair.sync(), pair.sync(), pair.sync()] == [OK, "507899", FAILED]
    assert pair.a.status("malloc x 4096") == NO_MEMORY
    assert pair.b.status("malloc x 4096") == OK
    pair.again()
    assert pair.sync() == OK
    assert pair.submit("q") == OK
    assert pair.finish("q") == ["507056", ENDED]
    pair.again()
    pair.sim.control(pair.a.pid, FAIL="poll:1+:0")
    assert pair.submit("q") == OK
    assert pair.finish("q") == [OK, ENDED]


def test_partial_corrupt_and_raw_status(pair: Pair) -> None:
    pair.sim.control(PARTIAL=1, RAW_STATUS=507899)
    assert pair.submit("q") == OK
    assert pair.finish("q") == ["507899", ENDED]
    assert pair.b(f"count m {PAGE} 10") == ["0", str(PAGE // 2)]
    pair.again()
    pair.sim.control(CORRUPT=2)
    assert pair.sync() == OK
    assert pair.b(f"count m {PAGE} 10") == ["0", str(PAGE)]
    assert pair.sync() == OK
    assert pair.b(f"count m {PAGE} 10") == ["0", str(PAGE - 1)]


def test_hangs_and_breaks_on_order(pair: Pair) -> None:
    pair.sim.control(HANG="disconnect", GBPS=0.001)
    assert pair.submit("q", 2 * PAGE) == OK
    ending = pair.a.line(f"& disconnect e {pair.b.name} 50")
    assert pair.a.line(f"wait {ending} 100") == "running"
    before = int(pair.b(f"count m {2 * PAGE} 10")[1])
    until = time.monotonic() + LIMIT_S
    while int(pair.b(f"count m {2 * PAGE} 10")[1]) == before:
        assert time.monotonic() < until, "nothing moves while Disconnect hangs"
    pair.sim.control(HANG="connect")
    assert pair.a.line(f"wait {ending} 5000") == OK
    connecting = pair.a.line(f"& connect e {pair.b.name} 50")
    assert pair.a.line(f"wait {connecting} 100") == "running"
    pair.sim.control(GBPS=0.001)
    assert pair.a.line(f"wait {connecting} 5000") == OK
    assert pair.submit("q", 2 * PAGE) == OK
    pair.sim.control(BREAK=1)
    assert pair.finish("q") == [FAILED, ENDED]


def test_lost_card(pair: Pair) -> None:
    assert pair.submit("q") == OK
    assert pair.finish("q") == [OK, COMPLETED]
    pair.sim.control(DEVICE_LOST=1)
    assert pair.a("health 1") == ["0", "1"]
    assert pair.a("health 0") == ["0", "0"]
    assert pair.sync() == LOST
    assert pair.b.status("malloc x 4096") == LOST
    pair.sim.control()
    pair.again()
    assert pair.sync() == OK


def test_the_model_of_bandwidth_and_latency(pair: Pair) -> None:
    pair.sim.control(GBPS=0.04, LATENCY_US=50000)
    started = time.monotonic()
    assert pair.sync("w", 2 * PAGE) == OK
    taken = time.monotonic() - started
    assert 0.05 + 0.9 * 2 * PAGE / 0.04e9 <= taken < LIMIT_S  # 50 ms and 105 ms
