"""A path with a smaller MTU than the interface's is named."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvxfer.cli.mtu import about_mtu, path_mtu

SCRIPT = """
import subprocess
from kvxfer.cli.mtu import about_mtu, path_mtu
for command in (
    "link add d0 type veth peer name d1",
    "addr add 10.8.0.1/24 dev d0",
    "link set d0 up mtu 9000",
    "route add 10.7.0.0/24 via 10.8.0.2 dev d0 mtu 1300",
):
    subprocess.run(["ip", *command.split()], check=True)
print(path_mtu("10.7.0.9"), path_mtu("10.8.0.9"))
print(about_mtu("10.7.0.9", path_mtu("10.7.0.9")))
"""


def test_loopback_has_nothing_to_say() -> None:
    found = path_mtu("127.0.0.1")
    assert found is not None
    assert found[0] == found[1]
    assert about_mtu("127.0.0.1", found) == ""


@pytest.mark.parametrize("host", ["no.numeric.address", "2001:db8::1"])
def test_what_cannot_be_told_is_no_error(host: str) -> None:
    assert about_mtu(host, path_mtu(host)) == ""


def test_a_smaller_path_is_named() -> None:
    text = about_mtu("10.7.0.9", (1300, 9000, "eth0"))
    assert "10.7.0.9: 1300 bytes, while eth0 sends up to 9000" in text


def test_in_a_network_of_its_own() -> None:
    """A route with an MTU, in a namespace that this test makes; where none may be made there is nothing to see."""
    command = ["unshare", "--user", "--map-root-user", "--net"]
    if subprocess.run(
        [*command, "ip", "link", "add", "d0", "type", "veth", "peer", "name", "d1"], check=False, capture_output=True
    ).returncode:
        pytest.skip("no network namespace may be made here")
    done = subprocess.run([*command, sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True)
    first, second = done.stdout.splitlines()
    assert first == "(1300, 9000, 'd0') (9000, 9000, 'd0')"
    assert second.startswith("path MTU to 10.7.0.9: 1300 bytes, while d0 sends up to 9000")
