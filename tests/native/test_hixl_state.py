"""The machine of a hixl link: pure, so its times are numbers and every order of events can be tried."""

from __future__ import annotations

import ctypes
import itertools
import random

import pytest

from kvxfer.native.status import StatusCode
from tests.native.alone import compiled

DOWN, CONNECTING, UP, DRAINING, ZOMBIE = range(5)
PING, CONNECT, DISCONNECT, REFUSE, SETTLE = 1, 2, 4, 8, 16
PING_MS, CONNECT_MS, DISCONNECT_MS = 50, 1000, 2000


class Raw(ctypes.Structure):
    _fields_ = (
        ("state", ctypes.c_int),
        *((name, ctypes.c_bool) for name in ("asks_first", "pinging", "disconnects", "unsettled", "paused")),
        *((name, ctypes.c_bool) for name in ("again", "broken")),
        ("refusal", ctypes.c_int),
        ("backoff_ms", ctypes.c_uint32),
        ("due_ms", ctypes.c_uint64),
        ("retry_ms", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("ping_ms", "connect_ms", "disconnect_ms")),
        ("zombies", ctypes.c_uint64),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    loaded = compiled(tmp_path_factory.mktemp("state"), "hixl_state")
    loaded.kvx_hixl_machine_due.restype = ctypes.c_uint64
    loaded.kvx_hixl_machine_out.restype = ctypes.c_bool
    return loaded


class Machine:
    def __init__(self, library: ctypes.CDLL, *, asks_first: bool = True) -> None:
        self.library, self.raw = library, Raw()
        library.kvx_hixl_machine_init(ctypes.byref(self.raw), asks_first, PING_MS, CONNECT_MS, DISCONNECT_MS)

    def call(self, name: str, *arguments: object) -> int:
        plain = [ctypes.c_uint64(one) if type(one) is int and one >= 0 else one for one in arguments]
        return int(getattr(self.library, f"kvx_hixl_machine_{name}")(ctypes.byref(self.raw), *plain))

    def want(self, now: int, refused: bool = False) -> int:
        return self.call("want", now, refused)

    def pong(self, now: int, status: int = 0) -> int:
        return self.call("pong", now, ctypes.c_int(status))

    def returned(self, now: int, status: int = 0) -> int:
        return self.call("returned", now, ctypes.c_int(status))

    def fail(self, now: int, broken: bool = True) -> int:
        return self.call("fail", now, broken)

    def time(self, now: int) -> int:
        return self.call("time", now)

    def due(self, wanted: bool = True) -> int:
        return self.call("due", wanted)

    @property
    def state(self) -> int:
        return int(self.raw.state)

    @property
    def out(self) -> bool:
        return bool(self.call("out"))


@pytest.fixture
def machine(library: ctypes.CDLL) -> Machine:
    return Machine(library)


def up(machine: Machine, now: int = 0) -> None:
    assert machine.want(now) == PING
    assert machine.pong(now) == CONNECT
    assert machine.returned(now) == 0
    assert machine.state == UP


def test_it_asks_before_it_connects(machine: Machine) -> None:
    assert machine.want(100) == PING
    assert not machine.out
    assert (machine.want(101), machine.state, machine.due()) == (0, CONNECTING, 150)
    assert machine.pong(110) == CONNECT
    assert machine.out
    assert machine.due() == 110 + CONNECT_MS
    assert machine.pong(111) == 0, "a second answer means nothing"
    assert (machine.returned(120), machine.state, machine.due()) == (0, UP, 0)


def test_who_does_not_answer_is_not_connected_to(machine: Machine) -> None:
    machine.want(0)
    assert machine.time(49) == 0
    assert (machine.time(50), machine.state) == (REFUSE, DOWN)
    assert machine.raw.refusal == StatusCode.TIMEOUT
    assert machine.want(149) == 0
    assert machine.due() == 150
    assert machine.want(150) == PING


def test_pauses_double_up_to_five_seconds(machine: Machine) -> None:
    now, pauses = 0, []
    for _ in range(8):
        assert machine.want(now) == PING
        assert machine.pong(now) == CONNECT
        assert machine.returned(now, StatusCode.LINK) == REFUSE
        assert machine.raw.refusal == StatusCode.LINK
        pauses.append(machine.due() - now)
        now = machine.due()
    assert pauses == [100, 200, 400, 800, 1600, 3200, 5000, 5000]
    up(machine, now)
    machine.call("good")
    machine.fail(now)
    machine.returned(now)
    assert machine.due() == now + 100


def test_a_late_connect_is_a_zombie_until_it_returns(machine: Machine) -> None:
    machine.want(0)
    machine.pong(0)
    assert (machine.time(CONNECT_MS), machine.state) == (REFUSE, ZOMBIE)
    assert (machine.raw.refusal, machine.raw.zombies) == (StatusCode.TIMEOUT, 1)
    assert machine.want(10**6) == REFUSE, "no second call while one is out"
    assert machine.out
    assert machine.returned(10**6, StatusCode.LINK) == 0
    assert (machine.state, machine.out) == (DOWN, False)
    assert machine.want(10**6) == 0, "it pauses"
    assert machine.want(10**6 + 100) == PING


@pytest.mark.parametrize("status", [StatusCode.OK, StatusCode.BUSY])
def test_a_connect_that_comes_back_late_and_well_is_taken_down(machine: Machine, status: StatusCode) -> None:
    machine.want(0)
    machine.pong(0)
    machine.time(CONNECT_MS)
    assert machine.returned(9000, status) == DISCONNECT
    assert machine.returned(9001) == 0, "nothing was submitted, so nothing settles"
    assert machine.state == DOWN


def test_connected_already_is_made_anew(machine: Machine) -> None:
    machine.want(0)
    machine.pong(0)
    assert (machine.returned(1, StatusCode.BUSY), machine.state) == (DISCONNECT, DRAINING)
    machine.returned(2)
    assert machine.want(2) == PING


def test_what_was_under_way_settles_when_the_disconnect_returns(machine: Machine) -> None:
    up(machine)
    assert (machine.fail(10), machine.state) == (DISCONNECT, DRAINING)
    assert (machine.fail(11), machine.want(12)) == (0, 0)
    assert machine.time(10 + DISCONNECT_MS - 1) == 0
    assert (machine.time(10 + DISCONNECT_MS), machine.state) == (REFUSE, ZOMBIE)
    assert machine.returned(10**5) == SETTLE, "late, but only now is it true"


def test_a_link_that_is_made_anew_does_not_pause(machine: Machine) -> None:
    up(machine)
    machine.fail(10, False)
    assert machine.returned(12) == SETTLE
    assert machine.want(12) == PING
    machine.pong(12)
    machine.returned(12)
    machine.fail(13, True)
    assert machine.returned(14) == SETTLE
    assert machine.want(14) == 0


def test_a_disconnect_that_fails_is_made_again(machine: Machine) -> None:
    up(machine)
    machine.fail(0)
    assert machine.returned(5, StatusCode.LINK) == 0
    assert (machine.state, machine.out) == (DRAINING, False)
    assert machine.time(machine.due()) == DISCONNECT
    assert machine.returned(200, StatusCode.PEER_LOST) == SETTLE, "not connected will do"


def test_too_many_zombies_refuse(machine: Machine) -> None:
    assert machine.want(0, True) == REFUSE
    assert (machine.raw.refusal, machine.state) == (StatusCode.LINK, DOWN)


def test_a_link_by_copies_needs_no_answer(library: ctypes.CDLL) -> None:
    machine = Machine(library, asks_first=False)
    assert machine.want(0) == CONNECT
    assert machine.returned(0) == 0
    assert machine.state == UP


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_events(library: ctypes.CDLL, seed: int) -> None:
    """Never two calls at once, and nothing settles but by a disconnect that returned."""
    rng, machine, now = random.Random(seed), Machine(library), 0
    out, moved = "", False
    for _ in itertools.repeat(None, 1500):
        now += rng.choice([0, 1, 7, 60, 1500])
        before = out
        status = rng.choice([StatusCode.OK, StatusCode.LINK, StatusCode.BUSY, StatusCode.PEER_LOST, StatusCode.TIMEOUT])
        event = rng.choice(["want", "pong", "returned", "fail", "time"])
        if event == "returned" and not out:
            continue
        if event == "returned":
            out = ""
            todo = machine.returned(now, status)
        elif event in ("want", "fail"):
            todo = getattr(machine, event)(now, rng.random() < 0.3 if event == "fail" else rng.random() < 0.05)
        else:
            todo = machine.pong(now, status) if event == "pong" else machine.time(now)
        if todo & (CONNECT | DISCONNECT):
            assert not out, f"{event}: a call while one is out"
            assert not (todo & CONNECT and todo & DISCONNECT)
            out = "connect" if todo & CONNECT else "disconnect"
        if todo & SETTLE:
            assert event == "returned"
            assert before == "disconnect"
            assert moved
            moved = False
        moved |= machine.state == UP
        assert machine.out == bool(out)
        if machine.state == UP:
            assert not out
