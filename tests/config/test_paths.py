"""The socket directory: found by rule, made private, refused when it is not."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from kvxfer.config import SOCKET_DIR_CHARS_MAX, Config, paths
from kvxfer.config.paths import (
    check_socket_dir,
    counters_path,
    daemon_socket,
    engine_dir,
    ensure_socket_dir,
    make_scratch_dir,
    socket_dir,
)
from kvxfer.errors import ConfigError


def test_the_rule() -> None:
    env = {"KVXFER_SOCKET_DIR": "/from/env", "XDG_RUNTIME_DIR": "/run/user/7"}
    assert socket_dir(Config(socket_dir="/from/config"), env) == Path("/from/config")
    assert socket_dir(Config(), env) == Path("/from/env")
    assert socket_dir(Config(), {"XDG_RUNTIME_DIR": "/run/user/7"}) == Path("/run/user/7/kvxfer")
    assert socket_dir(Config(), {}) == Path(f"/tmp/kvxfer-{os.getuid()}")
    assert socket_dir(Config(), {"XDG_RUNTIME_DIR": "relative"}) == Path(f"/tmp/kvxfer-{os.getuid()}")


@pytest.mark.parametrize("path", ["relative/dir", "/" + "x" * SOCKET_DIR_CHARS_MAX])
def test_a_directory_that_no_socket_fits_in(path: str) -> None:
    with pytest.raises(ConfigError, match="socket_dir"):
        socket_dir(Config(), {"KVXFER_SOCKET_DIR": path})
    with pytest.raises(ConfigError, match="socket_dir"):
        Config(socket_dir=path)


def test_the_longest_names_fit_a_socket_address() -> None:
    directory = Path("/" + "x" * (SOCKET_DIR_CHARS_MAX - 1))
    engine = directory / f"e-{'0' * 12}.sock"
    assert max(len(str(daemon_socket(directory))), len(str(engine))) <= 107
    assert counters_path(directory, bytes(16)).parent == directory


def test_it_is_made_private_whatever_the_mask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = ensure_socket_dir(tmp_path / "sockets")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o700
    assert ensure_socket_dir(path) == path


def test_what_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    for path, why in (
        (tmp_path / "no" / "sockets", "does not exist"),
        (file, "is not a directory"),
        (file / "sockets", "is not a directory"),
        (link, "is a symbolic link"),
        (open_to_all, "others may enter it"),
    ):
        with pytest.raises(ConfigError, match=why) as caught:
            ensure_socket_dir(path)
        assert str(path) in str(caught.value)


def test_a_client_does_not_trust_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        check_socket_dir(tmp_path / "none")


def test_the_reasons_of_the_system_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(self: Path, mode: int) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(ConfigError, match="read-only"):
        ensure_socket_dir(tmp_path / "sockets")


def test_a_directory_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ensure_socket_dir(tmp_path / "sockets")
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(ConfigError, match="not to user 4711"):
        check_socket_dir(path)


def test_an_engine_has_its_files_where_its_user_may_make_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_dir(tmp_path) == tmp_path
    assert engine_dir(tmp_path / "none") == tmp_path / "none"  # what is missing is the daemon's, and will be told
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)
    own = engine_dir(tmp_path)
    assert own == Path(f"/tmp/kvxfer-{os.getuid()}")
    assert own.stat().st_mode & 0o777 == 0o700


def test_a_shared_directory_lets_others_pass_and_nothing_else(tmp_path: Path) -> None:
    made = ensure_socket_dir(tmp_path / "new", shared=True)
    assert made.stat().st_mode & 0o777 == 0o711
    assert ensure_socket_dir(made, shared=True) == made
    with pytest.raises(ConfigError, match="others may enter"):
        ensure_socket_dir(made)
    for mode in (0o755, 0o733, 0o715):
        made.chmod(mode)
        with pytest.raises(ConfigError, match="others may enter"):
            ensure_socket_dir(made, shared=True)


def test_a_directory_that_ends_with_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = tmp_path / "t"
    short.mkdir()
    runtime = {"XDG_RUNTIME_DIR": str(short)}
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    made = make_scratch_dir("x-", {})
    assert made.parent == short
    assert made.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(tempfile, "tempdir", "/" + "d" * SOCKET_DIR_CHARS_MAX)
    elsewhere = make_scratch_dir("x-", {})
    assert elsewhere.parent == Path("/tmp"), "sockets need a short path"
    elsewhere.rmdir()

    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    monkeypatch.setattr(paths, "_scratch_places", lambda env: ("/proc", *runtime.values()))
    assert make_scratch_dir("x-", runtime).parent == short
    monkeypatch.setattr(paths, "_scratch_places", lambda env: ("/proc", "/" + "d" * SOCKET_DIR_CHARS_MAX))
    with pytest.raises(ConfigError, match=r"no place for a socket directory.*/proc: .*; /d+: too long") as refused:
        make_scratch_dir("x-", {})
    assert "TMPDIR" in str(refused.value.hint)
