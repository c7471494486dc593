"""/etc/hccn.conf: what is read, and every mistake that is noticed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.doctor.ascend import families, parse

GOOD = """# written by hccn_tool
address_0=29.1.0.10
netmask_0=255.255.0.0
gateway_0=29.1.0.1
netdetect_0=29.1.0.1
address_1 = 29.1.0.11
netmask_1=255.255.0.0
arp_1=-i eth1 -s 29.1.0.10
send_arp_status=1
"""


def test_a_good_file() -> None:
    settings = parse(GOOD)
    assert settings.wrong == ()
    assert {device: port.address for device, port in settings.ports.items()} == {0: "29.1.0.10", 1: "29.1.0.11"}
    assert settings.ports[0].gateway == "29.1.0.1"
    assert str(settings.ports[1].network) == "29.1.0.0/16"
    assert families(tuple(settings.ports.values())) == {4}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("address_0=1.1.1.1\naddress_1=1.1.1.1\n", "cards 0 and 1 have the same address 1.1.1.1"),
        ("netmask_3=255.255.255.0\n", "card 3 has no address"),
        ("address_0=1.1.1.300\nnetmask_0=255.255.255.0", "card 0: 1.1.1.300/255.255.255.0 is no address"),
        ("address_0=1.1.1.1\nnetmask_0=255.0.255.0", "is no address with a netmask"),
        ("address_0=1.1.1.1\nnetmask_0=255.255.255.0\ngateway_0=1.1.2.1", "gateway 1.1.2.1 is not in 1.1.1.0/24"),
        ("address_0=1.1.1.1\nnetmask_0=255.255.255.0\ngateway_0=router", "gateway router is not in"),
        ("address_0=1.1.1.1\naddress_0=1.1.1.2", "line 2 sets address_0 again, to another value"),
        ("address_0 1.1.1.1", "line 1 has no '='"),
    ],
)
def test_mistakes(text: str, expected: str) -> None:
    assert any(expected in wrong for wrong in parse(text).wrong), parse(text).wrong


def test_both_families() -> None:
    ports = parse("address_0=1.1.1.1\naddress_1=2001:db8::1\nnetmask_1=64\n").ports
    assert families(tuple(ports.values())) == {4, 6}
    assert str(ports[1].network) == "2001:db8::/64"


def test_an_empty_file_has_nothing_wrong() -> None:
    assert (parse("").ports, parse("\n# nothing\n").wrong) == ({}, ())


@given(st.text(max_size=300))
def test_any_text_is_read(text: str) -> None:
    parse(text)
