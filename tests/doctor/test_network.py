"""Looking at ports and addresses of this host, and at NICs that are a tree of files."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest

from kvxfer.config import Config
from kvxfer.config.user_secret import make_user_secret
from kvxfer.doctor.facts import RdmaPort
from kvxfer.doctor.network import probe_network
from tests.doctor.test_host import plant
from tests.nodes import node


def anywhere(tmp_path: Path, **options: object) -> Config:
    return Config.embedded(socket_dir=str(tmp_path / "run"), **options)


def test_free_ports(tmp_path: Path) -> None:
    network = probe_network(anywhere(tmp_path, http="127.0.0.1:0"))
    assert [(bind.option, bind.errno) for bind in network.binds] == [("listen", 0), ("http", 0), ("data_port", 0)]
    assert (network.daemon, network.socket_dir_error) == ("", "")
    assert 4 in network.families


def test_ports_of_hixl_are_looked_at_when_they_are_fixed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        network = probe_network(anywhere(tmp_path, hixl_port=other.getsockname()[1]))
    assert [(bind.option, bind.errno) for bind in network.binds][-1] == ("hixl_port", errno.EADDRINUSE)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        [bind, _] = probe_network(anywhere(tmp_path, listen=taken)).binds
    assert (bind.errno, bind.ours, bind.address) == (errno.EADDRINUSE, False, taken)
    assert "in use" in bind.reason


def test_an_address_of_another_host(tmp_path: Path) -> None:
    config = anywhere(tmp_path, listen="192.0.2.1:0", data_bind="127.0.0.1", advertise=("192.0.2.1", "127.0.0.1"))
    network = probe_network(config)
    assert network.binds[0].errno == errno.EADDRNOTAVAIL
    assert network.local == {"192.0.2.1": False, "127.0.0.1": True}


@pytest.mark.once
async def test_our_own_daemon() -> None:
    async with node(http="") as server:
        directory = str(server.socket_path.parent)
        network = probe_network(Config.embedded(socket_dir=directory, listen=server.addresses[0]))
    assert network.binds[0].ours
    assert "pid" in network.daemon


def test_a_directory_that_others_may_enter(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    (tmp_path / "run").chmod(0o755)
    assert "others may enter it" in probe_network(anywhere(tmp_path)).socket_dir_error


def test_the_secret_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "kvxfer" / "secret"
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    looked = probe_network(anywhere(tmp_path))
    assert (looked.user_secret, looked.user_secret_made, looked.user_secret_error) == (str(place), False, "")
    assert not place.parent.exists(), "it changes nothing"
    make_user_secret(Config())
    assert probe_network(anywhere(tmp_path)).user_secret_made
    place.chmod(0o644)
    assert "others may access it" in probe_network(anywhere(tmp_path)).user_secret_error
    assert probe_network(anywhere(tmp_path, secret="0123456789abcdef")).user_secret == ""


def test_kernel_settings_and_nics_from_files(tmp_path: Path) -> None:
    base, port = "/proc/sys/net/ipv4", "/sys/class/infiniband/mlx5_0/ports/1"
    files = {
        f"{base}/tcp_congestion_control": "bbr\n",
        f"{base}/tcp_available_congestion_control": "reno cubic bbr\n",
        f"{base}/tcp_rmem": "4096\t131072\t6291456\n",
        f"{base}/tcp_wmem": "4096 16384 4194304\n",
        f"{port}/state": "4: ACTIVE\n",
        f"{port}/phys_state": "5: LinkUp\n",
        f"{port}/link_layer": "Ethernet\n",
        f"{port}/rate": "200 Gb/sec (4X HDR)\n",
    }
    network = probe_network(anywhere(tmp_path), plant(tmp_path / "root", files))
    assert (network.tcp.congestion, network.tcp.available) == ("bbr", ("reno", "cubic", "bbr"))
    assert network.tcp.buffers_max == (6291456, 4194304)
    assert network.rdma == (
        RdmaPort(
            device="mlx5_0", port=1, state="ACTIVE", physical="LinkUp", layer="Ethernet", rate="200 Gb/sec (4X HDR)"
        ),
    )
