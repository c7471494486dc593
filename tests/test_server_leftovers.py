"""Files of killed processes are removed, those of living ones stay."""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path

from kvxfer.native.types import COUNTERS_BYTES, MAGIC, VERSION
from kvxfer.net.listeners import UnixListener
from kvxfer.server import DEAD_AFTER_S, remove_dead_directories, remove_leftovers


def engine_socket(directory: Path, name: str, *, alive: bool) -> socket.socket | None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(directory / f"e-{name}.sock"))
    if alive:
        listener.listen(1)
        return listener
    listener.close()
    return None


def test_dead_sockets_go_and_living_ones_stay(tmp_path: Path) -> None:
    engine_socket(tmp_path, "deadbeef0000", alive=False)
    alive = engine_socket(tmp_path, "a11ce0000000", alive=True)
    engine_socket(tmp_path, "0123456789ab", alive=False)
    (tmp_path / "c-deadbeef0000.counters").write_bytes(b"")
    (tmp_path / "c-a11ce0000000.counters").write_bytes(b"")
    (tmp_path / "kvxferd.lock").write_text(str(os.getpid()))
    assert remove_leftovers(tmp_path, ["0123456789ab" + "0" * 20]) == 2
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["c-a11ce0000000.counters", "e-0123456789ab.sock", "e-a11ce0000000.sock", "kvxferd.lock"]
    assert alive is not None
    alive.close()


def test_strange_files_neither_stop_nor_delay_the_sweep(tmp_path: Path) -> None:
    (tmp_path / "c-00.counters").mkdir()
    (tmp_path / "e-00.sock").mkdir()
    os.mkfifo(tmp_path / "c-01.counters")
    (tmp_path / "c-02.counters").symlink_to("/etc/passwd")
    with (tmp_path / "c-03.counters").open("wb") as file:
        file.truncate(1 << 40)
    head = struct.pack("=QII", MAGIC, VERSION, 0) + struct.pack("=Q", 1 << 63)  # a process of that number cannot be
    (tmp_path / "c-04.counters").write_bytes(head.ljust(COUNTERS_BYTES, b"\0"))
    assert remove_leftovers(tmp_path, []) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c-00.counters", "e-00.sock"]
    assert Path("/etc/passwd").exists()


def test_missing_directory_is_no_error(tmp_path: Path) -> None:
    assert remove_leftovers(tmp_path / "none", []) == 0


def test_directories_of_killed_daemons_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    for name in ("local-dead", "local-alive", "local-young", "local-strange", "other-dead"):
        (tmp_path / name).mkdir()
    for name in ("local-dead", "local-young", "other-dead"):
        (tmp_path / name / "kvxferd.lock").write_text("1")
    alive = UnixListener(tmp_path / "local-alive" / "kvxferd.sock")
    long_ago = time.time() - DEAD_AFTER_S - 1
    for path in tmp_path.iterdir():
        if path.name != "local-young":
            os.utime(path, (long_ago, long_ago))
    (tmp_path / "local-link").symlink_to(tmp_path / "other-dead")
    assert remove_dead_directories(tmp_path, "local-") == 1
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["local-alive", "local-link", "local-strange", "local-young", "other-dead"]
    alive.close()
