"""The secret of a user: where it lies, that it is made once however many want it, and what is refused."""

from __future__ import annotations

import multiprocessing
import os
import stat
import subprocess
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest

from kvxfer.config import Config, user_secret
from kvxfer.config.sources import SECRET_BYTES_MIN
from kvxfer.config.user_secret import (
    NoPlace,
    find_user_secret,
    make_user_secret,
    secret_dirs,
    secret_in_memory,
    where_user_secret,
)
from kvxfer.errors import ConfigError
from tests.conftest import slack

SOMEBODY = 54321  # no user of this host
CONFIG = Config()


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    made.mkdir(mode=0o700)
    return made


def env(runtime: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(runtime)}


def test_the_places(runtime: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(user_secret, "RUNTIME_DIRS", str(tmp_path / "none"))
    usual, beside = Path(f"/tmp/kvxfer-{os.getuid()}"), Config(socket_dir="/there")
    assert secret_dirs(CONFIG, env(runtime)) == (runtime / "kvxfer",)
    assert secret_dirs(CONFIG, {}) == (usual,)
    assert secret_dirs(beside, env(runtime)) == (runtime / "kvxfer", Path("/there"))
    assert secret_dirs(beside, {}) == (usual, Path("/there")), "two sockets of one user, one secret"
    assert secret_dirs(CONFIG, {"KVXFER_SOCKET_DIR": "/there"}) == (usual, Path("/there"))


def test_a_runtime_directory_that_others_can_write_to_is_not_the_user_s(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(user_secret, "RUNTIME_DIRS", str(tmp_path / "none"))
    usual = Path(f"/tmp/kvxfer-{os.getuid()}")
    runtime.chmod(0o777)
    assert secret_dirs(CONFIG, env(runtime))[0] == usual
    runtime.chmod(0o700)
    assert secret_dirs(CONFIG, {"XDG_RUNTIME_DIR": "run"})[0] == usual
    assert secret_dirs(CONFIG, {"XDG_RUNTIME_DIR": str(runtime / "gone")})[0] == usual


def test_outside_of_the_session_it_is_the_same_one(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process of cron has no XDG_RUNTIME_DIR; the directory of the session is there all the same."""
    own = tmp_path / str(os.getuid())
    own.mkdir(mode=0o700)
    monkeypatch.setattr(user_secret, "RUNTIME_DIRS", str(tmp_path))
    assert secret_dirs(CONFIG, {})[0] == own / "kvxfer"


def test_made_once_and_private_whatever_the_mask(runtime: Path) -> None:
    before = os.umask(0)
    try:
        made = make_user_secret(CONFIG, env(runtime))
    finally:
        os.umask(before)
    assert made.path == runtime / "kvxfer" / "secret"
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(made.path.parent.stat().st_mode) == 0o700
    [secret] = made.secrets
    assert len(secret) >= SECRET_BYTES_MIN
    assert secret.decode() not in repr(made)
    assert make_user_secret(CONFIG, env(runtime)) == made == find_user_secret(CONFIG, env(runtime))
    assert os.listdir(made.path.parent) == ["secret"]


def test_looking_makes_nothing(runtime: Path) -> None:
    assert find_user_secret(CONFIG, env(runtime)) is None
    assert where_user_secret(CONFIG, env(runtime)) == (runtime / "kvxfer" / "secret", False)
    assert os.listdir(runtime) == []
    made = make_user_secret(CONFIG, env(runtime))
    assert where_user_secret(CONFIG, env(runtime)) == (made.path, True)


def _made(place: str) -> tuple[bytes, ...]:
    return make_user_secret(Config(), {"XDG_RUNTIME_DIR": place}).secrets


def test_many_that_start_at_once_have_one(tmp_path: Path) -> None:
    with (
        ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("forkserver")) as processes,
        ThreadPoolExecutor(8) as threads,
    ):
        for number in range(20):
            place = tmp_path / str(number)
            place.mkdir(mode=0o700)
            coming = [pool.submit(_made, str(place)) for pool in (processes, threads) for _ in range(8)]
            assert len({one.result(60 * slack()) for one in coming}) == 1
            assert os.listdir(place / "kvxfer") == ["secret"]


def test_what_was_there_before_is_put_back(runtime: Path) -> None:
    made = make_user_secret(CONFIG, env(runtime))
    assert made.path is not None
    made.path.unlink()
    made.path.parent.rmdir()
    again = make_user_secret(CONFIG, env(runtime), keep=made.secrets[0])
    assert again.secrets == made.secrets
    assert make_user_secret(CONFIG, env(runtime), keep=b"x" * 32).secrets == made.secrets, "the file is what counts"


@pytest.mark.parametrize("function", [make_user_secret, find_user_secret, where_user_secret])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("chmod 644 secret", "others may access it .mode 0644."),
        ("chmod 660 secret", "others may access it"),
        ("mv secret other; ln -s other secret", "secret: is a symbolic link"),
        ("ln -sf /nowhere secret", "secret: is a symbolic link"),
        ("rm secret; mkdir secret", "is not a regular file"),
        ("rm secret; mkfifo -m 600 secret", "is not a regular file"),
        ("> secret", "holds 0 bytes"),
        ("echo short > secret", "holds 5 bytes"),
        ("chmod 777 .", "kvxfer: others may read or change it .mode 0777."),
        ("chmod 755 .", "others may read or change it"),
        ("cd ..; mv kvxfer there; ln -s there kvxfer", "kvxfer: is a symbolic link"),
        ("cd ..; rm -r kvxfer; touch kvxfer", "kvxfer: is not a directory"),
    ],
)
def test_what_is_refused_and_left_as_it_is(function: object, spoil: str, words: str, runtime: Path) -> None:
    assert callable(function)
    place = make_user_secret(CONFIG, env(runtime)).path
    assert place is not None
    subprocess.run(["sh", "-euc", spoil], cwd=place.parent, check=True)
    before = subprocess.run(["ls", "-lR", runtime], capture_output=True, check=True).stdout
    with pytest.raises(ConfigError, match=words) as refused:
        function(Config(socket_dir=str(runtime.parent / "beside")), env(runtime))
    assert refused.value.hint
    assert refused.value.fields["key"] == "secret_file"
    assert subprocess.run(["ls", "-lR", runtime], capture_output=True, check=True).stdout == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make what belongs to another user")
@pytest.mark.parametrize("what", ["kvxfer", "kvxfer/secret"])
def test_what_belongs_to_another_user_is_refused(what: str, runtime: Path) -> None:
    make_user_secret(CONFIG, env(runtime))
    os.chown(runtime / what, SOMEBODY, SOMEBODY)
    with pytest.raises(ConfigError, match=f"{what}: belongs to user {SOMEBODY}, not to user 0"):
        make_user_secret(CONFIG, env(runtime))


def test_passing_through_the_directory_is_no_harm(runtime: Path) -> None:
    """Its mode where the socket takes other users."""
    made = make_user_secret(CONFIG, env(runtime))
    (runtime / "kvxfer").chmod(0o711)
    assert make_user_secret(CONFIG, env(runtime)) == made


def test_where_there_is_no_place_it_is_beside_the_socket_or_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = [tmp_path / "gone" / "kvxfer"]
    monkeypatch.setattr(user_secret, "secret_dirs", lambda *_: tuple(gone))
    for function in (make_user_secret, where_user_secret):
        with pytest.raises(NoPlace, match=r"no place for the secret of this user.*gone/kvxfer") as nowhere:
            function(CONFIG, {})
        assert "XDG_RUNTIME_DIR" in str(nowhere.value.hint)
    gone.append(tmp_path / "beside")
    assert where_user_secret(CONFIG, {}) == (tmp_path / "beside" / "secret", False)
    made = make_user_secret(CONFIG, {})
    assert made.path == tmp_path / "beside" / "secret"
    assert find_user_secret(CONFIG, {}) == made


def test_one_in_memory_is_the_same_in_a_process() -> None:
    assert secret_in_memory() == secret_in_memory()
    assert len(secret_in_memory()) >= SECRET_BYTES_MIN
