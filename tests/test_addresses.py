"""Addresses: what is written in any clear form is understood, what is doubtful is refused with a hint."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.addresses import (
    Address,
    format_address,
    is_loopback,
    is_numeric,
    is_wildcard,
    parse_address,
    parse_host,
)
from kvxfer.errors import KvxferError, UsageError

LABEL = st.from_regex(r"\A[a-z]([a-z0-9-]{0,10}[a-z0-9])?\Z")
NAMES = st.lists(LABEL, min_size=1, max_size=4).map(".".join)
ZONES = st.one_of(st.just(""), st.from_regex(r"\A%[a-z][a-z0-9]{0,8}\Z"))
V6 = st.builds(lambda address, zone: str(address) + zone, st.ip_addresses(v=6), ZONES)
HOSTS = st.one_of(NAMES, st.ip_addresses(v=4).map(str), V6)
PORTS = st.integers(0, 65535)


@given(HOSTS, PORTS)
def test_what_is_formatted_is_parsed_back(host: str, port: int) -> None:
    address = parse_address(format_address(host, port))
    assert (address.host, address.port) == (host, port)
    assert parse_address(str(address)) == address


@given(HOSTS)
def test_a_host_alone_is_a_host(host: str) -> None:
    assert parse_host(host) == host
    if ":" in host:
        assert parse_host(f"[{host}]") == host


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("localhost:80", "localhost", 80),
        ("Node-7.Example.COM:80", "node-7.example.com", 80),
        ("10.0.0.1:0", "10.0.0.1", 0),
        ("[::1]:65535", "::1", 65535),
        ("[2001:DB8:0:0::1]:9000", "2001:db8::1", 9000),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
        ("10.0.0.1", "10.0.0.1", 7),
        ("name", "name", 7),
        ("[::1]", "::1", 7),
        ("::1", "::1", 7),
        ("fe80::1", "fe80::1", 7),
        ("2001:db8::1:abcd", "2001:db8::1:abcd", 7),
        ("1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7:8", 7),
    ],
)
def test_forms(text: str, host: str, port: int) -> None:
    assert parse_address(text, default_port=7) == Address(host, port)


@pytest.mark.parametrize("text", ["2001:db8::1:9000", "::1:80", "fe80::1:2:17800"])
def test_a_last_group_that_may_be_a_port_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_address(text, default_port=7)
    head, _, port = text.rpartition(":")
    assert caught.value.hint is not None
    assert f"[{head}]:{port}" in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        *("", ":80", "host:", "host:80x", "host:-1", "host:+1", "host: 80", "host:65536", "host:000080", "host:８０"),
        *("[::1", "[::1]80", "[::1]:", "[]:80", "[host]:80", "[1.2.3.4]:80", "::1]:80", "[::1%]:80", "[::1%a b]:80"),
        *("a b:80", "-a:80", "a-:80", "a..b:80", "höst:80", "http://host:80", "user@host:80", "*:80", "/tmp/x:80"),
        *("127.1:80", "1.2.3:80", "256.1.1.1:80", "0177.0.0.1:80", "1.2.3.4.:80", "1:80", "a" * 64 + ":80"),
        *("x" * 300, ":::80", "1:2:3:80"),
    ],
)
def test_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_address(text)


@pytest.mark.parametrize("text", ["host", "1.2.3.4", "[::1]", "::1"])
def test_a_missing_port_is_refused_unless_there_is_a_default(text: str) -> None:
    with pytest.raises(UsageError, match="port is missing"):
        parse_address(text)


@pytest.mark.parametrize("text", ["", "host:80", "[::1]:80", "[::1", "1.2.3.4:80", None, 5, "x" * 300])
def test_a_host_alone_has_no_port(text: str) -> None:
    with pytest.raises(UsageError):
        parse_host(text)


@given(st.text(max_size=40))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        address = parse_address(text, default_port=1)
    except KvxferError:
        return
    assert parse_address(str(address)) == address


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST", "::ffff:127.0.0.1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    assert not is_wildcard(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::ffff:0.0.0.0"])
def test_wildcard(host: str) -> None:
    assert is_wildcard(host)
    assert not is_loopback(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "::ffff:10.0.0.1", "fe80::1%lo", "node", "localhost.example.com"])
def test_neither(host: str) -> None:
    assert not is_loopback(host)
    assert not is_wildcard(host)


@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)))
def test_loopback_agrees_with_the_library(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    assert is_loopback(str(address)) == (mapped or address).is_loopback
    assert is_numeric(str(address))


def test_names_are_not_numeric() -> None:
    assert not is_numeric("localhost")
    assert Address("::1", 5).is_loopback
    assert Address("::", 5).is_wildcard
