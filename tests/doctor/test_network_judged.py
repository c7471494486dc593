"""Judgements about addresses, ports and other nodes, with made-up facts."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvxfer.config import Config
from kvxfer.doctor.facts import Bind, Candidate, Finding, FindingState, Network, PeerSeen, Program, RdmaPort, Tcp, worst
from kvxfer.doctor.network import accepts, family, judge_network, judge_peer, judge_toolkits
from tests.certificates import Authority

SECRET = {"secret": "0123456789abcdef"}
OURS = Program(version="0.1.0", protocol=1)
SEEN = PeerSeen(
    given="10.0.0.6:17800",
    candidates=(Candidate(address="10.0.0.6:17800", ms=0.3),),
    version="0.1.0",
    protocol=1,
    transports=("shm", "tcp"),
    addresses=("10.0.0.6:17800",),
)


def findings(network: Network | None = None, config: Config | None = None) -> list[Finding]:
    return list(judge_network(network or Network(socket_dir="/run/kvxfer"), config or Config()))


def one(check: str, network: Network | None = None, config: Config | None = None) -> Finding:
    [finding] = [finding for finding in findings(network, config) if finding.check == check]
    return finding


def peer(seen: PeerSeen, network: Network | None = None, **ours: object) -> list[Finding]:
    return list(judge_peer(seen, OURS, ("shm", "tcp"), ours, network or Network()))


def test_defaults_are_fine() -> None:
    assert worst(findings()) is FindingState.OK


def test_the_secret_of_the_user() -> None:
    check, place = "secret of this user", "/run/user/7/kvxfer/secret"
    assert "the first daemon makes" in one(check, Network(user_secret=place)).found
    assert one(check, Network(user_secret=place, user_secret_made=True)).found.endswith(place)
    assert one(check, Network(user_secret_error="no place")).state is FindingState.PROBLEM
    assert not [finding for finding in findings(Network()) if finding.check == check], "something else is configured"


@pytest.mark.parametrize(
    ("bind", "state", "word"),
    [
        (Bind(option="listen", address="127.0.0.1:17800"), FindingState.OK, ""),
        (Bind(option="listen", address="a:1", errno=errno.EADDRINUSE, reason="in use", ours=True), FindingState.OK, ""),
        (
            Bind(option="listen", address="a:1", errno=errno.EADDRINUSE, reason="in use"),
            FindingState.PROBLEM,
            "ss -ltnp",
        ),
        (Bind(option="listen", address="a:1", errno=errno.EADDRNOTAVAIL), FindingState.PROBLEM, "no interface"),
        (Bind(option="listen", address="a:1", errno=errno.EACCES), FindingState.PROBLEM, "below 1024"),
        (Bind(option="listen", address="a:1", errno=errno.EAFNOSUPPORT), FindingState.PROBLEM, "address family"),
        (Bind(option="listen", address="a:1", errno=errno.EIO), FindingState.PROBLEM, "another address"),
    ],
)
def test_ports(bind: Bind, state: FindingState, word: str) -> None:
    finding = one("port of listen", Network(binds=(bind,)))
    assert (finding.state, word in finding.advice) == (state, True)


@pytest.mark.parametrize(
    ("bound", "dialled", "expected"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "2001:db8::1", False),
        ("2001:db8::1", "10.0.0.1", False),
        ("::", "10.0.0.1", True),
        ("0.0.0.0", "2001:db8::1", False),
        ("0.0.0.0", "::ffff:10.0.0.1", True),
        ("10.0.0.1", "node-a", True),
    ],
)
def test_families(bound: str, dialled: str, expected: bool) -> None:
    assert accepts(bound, dialled) is expected


def test_names_have_no_family() -> None:
    assert (family("10.0.0.1"), family("::1"), family("localhost")) == (4, 6, 0)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"listen": "10.0.0.1:17800", "advertise": ("[2001:db8::1]:17800",), **SECRET}, "is IPv6, but 10.0.0.1 takes"),
        ({"listen": "0.0.0.0:17800", "advertise": ("[2001:db8::1]:17800",), **SECRET}, "is IPv6, but 0.0.0.0 takes"),
        ({"advertise": ("10.0.0.1:17800",)}, "nobody gets through"),
        ({"listen": "0.0.0.0:17800", **SECRET}, "nothing says what peers shall dial"),
    ],
)
def test_what_nobody_can_dial(options: dict[str, Any], word: str) -> None:
    finding = one("advertise", config=Config(data_bind="127.0.0.1", **options))
    assert (finding.state, word in finding.found) == (FindingState.PROBLEM, True), finding


def test_both_families_through_one_wildcard() -> None:
    config = Config(listen="[::]:17800", advertise=("10.0.0.1:0", "[2001:db8::1]:0"), data_bind="127.0.0.1", **SECRET)
    assert one("advertise", config=config).state is FindingState.OK


def test_an_address_of_another_host() -> None:
    config = Config(listen="0.0.0.0:17800", advertise=("203.0.113.9:17800",), data_bind="127.0.0.1", **SECRET)
    foreign = one("advertise", Network(local={"203.0.113.9": False}), config)
    assert (foreign.state, "NAT" in foreign.advice) == (FindingState.WARNING, True)
    assert one("advertise", Network(local={"203.0.113.9": True}), config).state is FindingState.OK


def test_control_and_data_of_two_families() -> None:
    config = Config(listen="10.0.0.1:17800", data_bind="2001:db8::1", **SECRET)
    assert one("data_bind", config=config).state is FindingState.WARNING


def test_a_secret_is_missed() -> None:
    finding = one("secret", config=Config(listen="10.0.0.1:17800"))
    assert (finding.state, "secret_file" in finding.advice) == (FindingState.PROBLEM, True)


def test_kernel_settings() -> None:
    tcp = Tcp(congestion="bbr", available=("cubic", "bbr"), buffers_max=(6 << 20, 212992))
    assert "modprobe tcp_reno" in one("tcp congestion control", Network(tcp=tcp)).advice
    assert one("tcp congestion control", Network(tcp=tcp), Config(tcp_congestion="")).state is FindingState.OK
    buffers = one("tcp buffers", Network(tcp=tcp))
    assert (buffers.state, "208 KiB" in buffers.found) == (FindingState.WARNING, True)


def test_the_socket_directory() -> None:
    assert one("socket directory", Network(socket_dir_error="others may enter it")).state is FindingState.PROBLEM
    assert "pid 7" in one("socket directory", Network(socket_dir="/x", daemon="a daemon (pid 7)")).found


def test_rdma_ports() -> None:
    up = RdmaPort(device="mlx5_0", port=1, state="ACTIVE", physical="LinkUp", layer="Ethernet", rate="200 Gb/sec")
    down = replace(up, device="mlx5_1", state="DOWN")
    network = Network(rdma=(up, down))
    assert one("mlx5_0 port 1", network).state is FindingState.OK
    assert one("mlx5_1 port 1", network).state is FindingState.WARNING
    assert one("host NICs").state is FindingState.NOT_HERE


def test_a_good_peer() -> None:
    assert worst(peer(SEEN)) is FindingState.OK


def test_a_peer_that_does_not_answer() -> None:
    refused = Candidate(address="10.0.0.6:17800", error="Connection refused")
    gone = replace(SEEN, candidates=(refused,), error="no candidate address answers", hint="start it")
    found = peer(gone)
    assert [finding.state for finding in found] == [FindingState.PROBLEM, FindingState.PROBLEM]
    assert "Connection refused" in found[0].found
    assert found[1].advice == "start it"


def test_one_dead_candidate_of_a_peer_that_answers() -> None:
    dead = Candidate(address="[2001:db8::6]:17800", family=6, error="Network is unreachable")
    network = Network(families=frozenset({4}))
    [finding, *_] = peer(replace(SEEN, candidates=(dead, *SEEN.candidates)), network)
    assert (finding.state, "no IPv6 route" in finding.advice) == (FindingState.WARNING, True)


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"protocol": 2}, "older protocol"), ({"version": "0.2.0"}, "rolling upgrade"), ({"version": ""}, "rolling")],
)
def test_versions_that_do_not_match(changes: dict[str, Any], word: str) -> None:
    [finding] = [finding for finding in peer(replace(SEEN, **changes)) if finding.check.endswith("version")]
    assert (finding.state, word in finding.advice) == (FindingState.WARNING, True)
    assert "here 0.1.0" in finding.found


def test_patch_versions_do_not_matter() -> None:
    assert worst(peer(replace(SEEN, version="0.1.7"))) is FindingState.OK


def test_no_transport_in_common() -> None:
    [finding] = [
        finding for finding in peer(replace(SEEN, transports=("loop", "hixl"))) if "transports" in finding.check
    ]
    assert finding.state is FindingState.PROBLEM


def test_what_a_peer_tells_others_to_dial() -> None:
    loopback = peer(replace(SEEN, addresses=("127.0.0.1:17800",)))
    assert [finding.found for finding in loopback if finding.state is FindingState.PROBLEM] == [
        "it tells others to dial 127.0.0.1:17800, which is every host's own loopback"
    ]
    mixed = peer(replace(SEEN, data_advertise=("2001:db8::6",)), Network(families=frozenset({4})))
    assert ["no IPv6 route" in finding.found for finding in mixed if finding.state is FindingState.PROBLEM] == [True]
    here = replace(SEEN, given="127.0.0.1:17800", addresses=("127.0.0.1:17800", "no/address"))
    assert worst(peer(here)) is FindingState.OK


REAL = {"soc": "Ascend910B3", "toolkit": "9.1+", "simulated": False}


@pytest.mark.parametrize(
    ("theirs", "state"),
    [
        (REAL, FindingState.OK),
        (REAL | {"toolkit": "8.5"}, FindingState.WARNING),
        (REAL | {"reported": "9.1.0"}, FindingState.OK),  # one side alone says it
        ({"toolkit": "9.1+", "driver": "25.5"}, FindingState.OK),  # not loaded there
        ({"toolkit": "9.0", "driver": "25.5"}, FindingState.WARNING),
        (REAL | {"simulated": True, "soc": "KVXSim910"}, FindingState.PROBLEM),
    ],
)
def test_toolkits(theirs: dict[str, object], state: FindingState) -> None:
    [finding] = judge_toolkits("peer", dict(REAL), theirs)
    assert finding.state is state


def test_what_differs_is_named() -> None:
    ours = {"toolkit": "9.1+", "reported": "9.1.0", "driver": "25.5.0"}
    [finding] = judge_toolkits("peer", dict(ours), ours | {"reported": "9.2.0", "driver": "25.5.1"})
    assert (finding.state, "version, driver differ" in finding.found) == (FindingState.WARNING, True)
    assert "there libraries not loaded, toolkit 9.1+, version 9.2.0, driver 25.5.1" in finding.found


def test_toolkits_of_one_side_only_say_nothing() -> None:
    assert list(judge_toolkits("peer", {}, REAL)) == []
    assert list(judge_toolkits("peer", dict(REAL), {})) == []


def test_certificates_are_tried_before_the_daemon_does(tmp_path: Path) -> None:
    authority, node_id = Authority(tmp_path), "0a" * 16
    for days, state in ((30, FindingState.OK), (2, FindingState.WARNING), (-1, FindingState.PROBLEM)):
        config = Config(**authority.issue("a", node_id, days=days).options())
        found = one("certificate", config=config)
        assert found.state is state
        assert ("expired" if days < 0 else node_id) in found.found
