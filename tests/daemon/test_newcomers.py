"""Whose connection makes room: the oldest one of the address that has most of them."""

from __future__ import annotations

import pytest

from kvxfer.daemon.newcomers import HalfOpenConnections, source_of


def test_the_oldest_of_the_address_with_most_goes() -> None:
    line: HalfOpenConnections[str] = HalfOpenConnections()
    assert line.displaced() is None
    for one, source in (("a1", "a"), ("b1", "b"), ("b2", "b"), ("a2", "a"), ("b3", "b")):
        line.add(one, source)
    assert line.displaced() == "b1"
    assert line.discard("b1")
    assert not line.discard("b1")
    assert line.discard("b2")
    assert line.displaced() == "a1"
    assert list(line) == ["a1", "a2", "b3"]
    assert len(line) == 3
    assert "b3" in line


def test_one_address_never_displaces_those_of_others() -> None:
    line: HalfOpenConnections[int] = HalfOpenConnections()
    line.add(-1, "honest")
    for one in range(1000):
        if len(line) == 8:
            gone = line.displaced()
            assert gone is not None
            assert gone != -1
            line.discard(gone)
        line.add(one, "flood")
    assert -1 in line
    assert list(line)[1:] == list(range(993, 1000))


@pytest.mark.parametrize(
    ("host", "source"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("fd00:1:2:3::9", "fd00:1:2:3::/64"),
        ("fd00:1:2:3:ffff::1", "fd00:1:2:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_an_ipv6_host_counts_as_its_network(host: str, source: str) -> None:
    assert source_of(host) == source
