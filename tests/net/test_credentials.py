"""Secrets and certificates that change while the daemon runs: taken when good, left alone when not, and counted."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvxfer.config import Config
from kvxfer.config.sources import SECRETS_MAX, read_secret_file
from kvxfer.config.user_secret import secret_in_memory
from kvxfer.errors import ConfigError
from kvxfer.net.credentials import Credentials, NodeKeys
from tests.certificates import Authority

pytestmark = pytest.mark.once

A, B = "0a" * 16, "0b" * 16
OLD, NEW = "the old secret of all", "the new secret of all"


def written(path: Path, text: str) -> Path:
    fresh = path.with_suffix(".new")
    fresh.touch(mode=0o600)
    fresh.write_text(text)
    fresh.replace(path)
    return path


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_without_any() -> None:
    none = Credentials(Config(), unconfigured="none")
    assert (none.secret, none.secrets, none.node_id, none.expires_in_s, none.channel("dialler")) == (
        b"",
        (),
        "",
        None,
        None,
    )
    assert not none.watches
    none.poll()
    none.reload()
    assert none.failures == none.reloads == {"tls": 0, "secret": 0, "node_keys": 0}


def test_of_several_secrets_the_first_is_used(tmp_path: Path) -> None:
    path = written(tmp_path / "secret", f"{NEW}\r\n\n{OLD}\n")
    known = Credentials(Config(secret_file=str(path)))
    assert known.secret == NEW.encode()
    assert known.secrets == (NEW.encode(), OLD.encode())
    assert NEW not in repr(known) + repr(Config(secret=NEW))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "0 bytes"),
        ("\n\n", "0 bytes"),
        (f"{NEW}\nshort\n", "secret 2 holds 5 bytes"),
        ("x" * 2000, "accepted: 16 to 1024"),
        (
            "\n".join(f"the secret number {number}" for number in range(SECRETS_MAX + 1)),
            f"more than {SECRETS_MAX} lines",
        ),
    ],
)
def test_secrets_that_cannot_be_used(text: str, words: str, tmp_path: Path) -> None:
    path = written(tmp_path / "secret", text)
    with pytest.raises(ConfigError, match=words) as caught:
        read_secret_file(str(path))
    assert NEW not in str(caught.value)


def test_a_refused_file_leaves_no_descriptor_open(tmp_path: Path) -> None:
    fifo, loose = tmp_path / "fifo", written(tmp_path / "loose", NEW)
    os.mkfifo(fifo, 0o600)
    loose.chmod(0o644)
    before = descriptors()
    for path in (tmp_path, fifo, loose, tmp_path / "none"):
        with pytest.raises(ConfigError):
            read_secret_file(str(path))
    assert descriptors() == before


def test_a_new_secret_is_taken_and_a_broken_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path / "secret", OLD)
    known = Credentials(Config(secret_file=str(path)))
    known.poll()
    assert known.reloads["secret"] == 0
    written(path, f"{NEW}\n{OLD}")
    known.poll()
    assert known.secrets == (NEW.encode(), OLD.encode())
    written(path, "short")
    known.poll()
    known.poll()  # looked at once for each change
    path.unlink()
    known.poll()
    assert known.secret == NEW.encode()
    assert (known.failures["secret"], known.reloads["secret"]) == (2, 1)
    assert "old ones stay in force" in caplog.text
    assert "short" not in caplog.text
    written(path, OLD)
    known.poll()
    assert known.secrets == (OLD.encode(),)
    assert NEW not in caplog.text
    assert OLD not in caplog.text


def test_a_new_certificate_is_taken_when_it_fits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other")
    files = authority.issue("a", A, days=2)
    known = Credentials(Config(**files.options()))
    assert known.node_id == A
    assert known.expires_in_s is not None
    assert abs(known.expires_in_s - 2 * 86400) < 60
    for wrong in (authority.issue("b", B), authority.issue("late", A, days=-1)):
        files.take(wrong)
        known.poll()
        assert known.node_id == A
    assert known.failures["tls"] == 2
    assert "another node than this one" in caplog.text
    assert "expired" in caplog.text
    files.cert.write_text("")  # an operator who is in the middle of it
    known.poll()
    assert known.failures["tls"] == 3
    files.take(authority.issue("next", A, days=20))
    known.poll()
    assert known.expires_in_s > 19 * 86400
    files.take(other.issue("a", A))  # its authority comes along
    known.reload()
    assert known.reloads["tls"] == 2
    assert known.expires_in_s < 3 * 86400
    assert "PRIVATE KEY" not in caplog.text


def test_what_is_left_is_told_below_zero_too(tmp_path: Path) -> None:
    files = Authority(tmp_path).issue("a", A, days=1)
    known = Credentials(Config(**files.options()), wall=lambda: time.time() + 2 * 86400)
    assert known.expires_in_s is not None
    assert known.expires_in_s < -86000


def test_links_as_those_of_kubernetes_are_followed(tmp_path: Path) -> None:
    for name, text in (("one", OLD), ("two", NEW)):
        (tmp_path / name).mkdir()
        written(tmp_path / name / "secret", text)
    (tmp_path / "data").symlink_to("one")
    (tmp_path / "secret").symlink_to("data/secret")
    known = Credentials(Config(secret_file=str(tmp_path / "secret")))
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").replace(tmp_path / "data")
    known.poll()
    assert known.secret == NEW.encode()


def keys_file(path: Path, node: str, *roots: str) -> Path:
    made = NodeKeys.derive([root.encode() for root in roots], node, (A, B))
    return written(path, made.render())


def test_new_node_keys_are_taken_and_those_of_another_node_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = keys_file(tmp_path / "keys", A, OLD)
    known = Credentials(Config(node_keys_file=str(path), listen="0.0.0.0:1", advertise=("10.0.0.1",)))
    assert known.keys is not None
    assert known.node_id == known.keys.node_id == A
    assert known.watches
    own = known.keys.generations[0].own.hex()
    assert own not in repr(known)
    keys_file(path, A, NEW, OLD)
    known.poll()
    assert len(known.keys.generations) == 2
    for broken in (lambda: keys_file(path, B, NEW), lambda: written(path, "kvxfer node keys 1\nrubbish " + own)):
        broken()
        known.poll()
        known.poll()
    assert known.keys.node_id == A
    assert (known.reloads["node_keys"], known.failures["node_keys"]) == (1, 2)
    assert own not in caplog.text


def test_node_keys_are_for_their_owner_alone(
    tmp_path: Path,
) -> None:
    path = keys_file(tmp_path / "keys", B, OLD)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="others may access it"):
        Credentials(Config(node_keys_file=str(path)))
    with pytest.raises(ConfigError, match="cannot be read"):
        Credentials(Config(node_keys_file=str(tmp_path / "none")))


def test_with_nothing_configured_it_is_the_secret_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    looking = Credentials(Config(), unconfigured="look")
    assert looking.secret == secret_in_memory(), "a tool makes no file"
    assert not looking.watches
    assert os.listdir(tmp_path) == []
    known = Credentials(Config())
    assert known.watches
    assert len(known.secrets) == 1
    assert known.secret != secret_in_memory()
    assert Credentials(Config(), unconfigured="look").secrets == known.secrets
    for options in ({"secret": NEW}, {"secret_file": str(written(tmp_path / "secret", OLD))}):
        assert known.secret not in Credentials(Config(**options)).secrets, "what is configured takes its place"
    before = descriptors()
    known.poll()
    assert known.reloads["secret"] == 0
    (tmp_path / "kvxfer" / "secret").unlink()
    known.poll()
    assert known.reloads["secret"] == 1
    assert Credentials(Config(), unconfigured="look").secrets == known.secrets
    (tmp_path / "kvxfer").chmod(0o777)
    (tmp_path / "kvxfer" / "secret").unlink()
    known.poll()
    assert known.failures["secret"] == 1
    assert known.secret
    assert descriptors() == before
