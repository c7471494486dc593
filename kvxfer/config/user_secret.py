"""The secret of this user on this host: what daemons and tools prove themselves with where nothing is configured.

The idea: a port on loopback is open to every user of the host, so there is always a proof. The first daemon of a user
makes a secret in a directory of this user alone, and all others of the user find it there. The file appears with its
whole content or not at all, and only once, however many start at the same moment. What other users could have prepared
(another owner, an open mode, a symbolic link) is refused with the reason and never repaired.
"""

from __future__ import annotations

import base64
import errno
import functools
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvxfer.config.paths import socket_dir
from kvxfer.config.settings import Config
from kvxfer.config.sources import SECRET_FILE_BYTES_MAX, parse_secrets
from kvxfer.errors import ConfigError

SECRET_NAME = "secret"
RANDOM_BYTES = 32
RUNTIME_DIRS = "/run/user"
ATTEMPTS = 8  # each is lost only to somebody who made the file or removed it in between


@dataclass(frozen=True, slots=True, kw_only=True)
class UserSecret:
    """What was found or made: the secrets, the first one is used; the file that holds them, None: only memory; and
    ``mark``, the file's time of change in ns, number and size at the moment before it was read.
    """

    secrets: tuple[bytes, ...] = field(repr=False)
    path: Path | None
    mark: tuple[int, int, int] = (0, 0, 0)


class NoPlace(ConfigError):
    """There is no directory where this user's secret could be kept; the fields say what was tried."""


def secret_dirs(config: Config, env: Mapping[str, str] | None = None) -> tuple[Path, ...]:
    """Where the secret may lie, best first: the user's runtime directory, else /tmp/kvxfer-<uid>; where neither can be
    used, beside the daemon's socket. Looks whether the runtime directory is this user's, makes nothing.

    The first does not depend on `socket_dir`: two daemons of one user have two sockets and one secret.
    """
    env = os.environ if env is None else env
    own = f"{RUNTIME_DIRS}/{os.getuid()}"  # also for a process outside of the login session, such as one of cron
    runtime = next((Path(path) for path in (env.get("XDG_RUNTIME_DIR", ""), own) if _is_own(path)), None)
    first = Path(f"/tmp/kvxfer-{os.getuid()}") if runtime is None else runtime / "kvxfer"
    return tuple(dict.fromkeys((first, socket_dir(config, env))))


def find_user_secret(config: Config, env: Mapping[str, str] | None = None) -> UserSecret | None:
    """The secret, if some daemon has made it. Changes nothing. Raises `ConfigError` for what must not be used."""
    for directory in secret_dirs(config, env):
        try:
            with _opened(directory) as descriptor:
                return _read(descriptor, directory)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _refused(directory, f"cannot be read: {error.strerror}") from error
    return None


def where_user_secret(config: Config, env: Mapping[str, str] | None = None) -> tuple[Path, bool]:
    """The file where it is, True; or where the first daemon will make it, False. Changes nothing.

    Raises `ConfigError` for what must not be used, `NoPlace` when it can be kept nowhere.
    """
    found = find_user_secret(config, env)
    if found is not None and found.path is not None:
        return found.path, True
    directories = secret_dirs(config, env)
    for directory in directories:
        if os.access(directory if directory.exists() else directory.parent, os.W_OK | os.X_OK):
            return directory / SECRET_NAME, False
    raise _nowhere([f"{directory} cannot be written" for directory in directories])


def make_user_secret(config: Config, env: Mapping[str, str] | None = None, *, keep: bytes = b"") -> UserSecret:
    """The secret; made, when there is none: of fresh random bytes, or ``keep``, which was there before.

    Raises `ConfigError` for what must not be used, `NoPlace` when it can be kept nowhere.
    """
    tried: list[str] = []
    for directory in secret_dirs(config, env):
        try:
            with suppress(FileExistsError):
                directory.mkdir(mode=0o700)
            with _opened(directory) as descriptor:
                return _read_or_make(descriptor, directory, keep)
        except OSError as error:
            tried.append(f"{directory}: {error.strerror}")
    raise _nowhere(tried)


@functools.cache
def secret_in_memory() -> bytes:
    """A secret that ends with this process: its own daemons meet, and nobody else gets in."""
    return _random()


def _nowhere(tried: list[str]) -> NoPlace:
    hint = "set XDG_RUNTIME_DIR to a directory of this user that can be written, or secret_file to a file with a secret"
    return NoPlace(f"there is no place for the secret of this user: {'; '.join(tried)}", key="secret_file", hint=hint)


def _random() -> bytes:
    return base64.b64encode(secrets.token_bytes(RANDOM_BYTES))


def _is_own(path: str) -> bool:
    """A directory of this user where nobody else can put something."""
    if not path.startswith("/"):
        return False
    try:
        status = os.stat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    """A descriptor of the directory, which is this user's alone: what follows cannot be led elsewhere.

    Raises `ConfigError` for a wrong one, `OSError` when it cannot be opened.
    """
    try:
        opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        link = directory.is_symlink()
        raise _refused(directory, "is a symbolic link" if link else "is not a directory") from None
    try:
        status = os.fstat(opened)
        if status.st_uid != os.getuid():
            raise _refused(directory, f"belongs to user {status.st_uid}, not to user {os.getuid()}")
        if status.st_mode & 0o066:  # to pass through it (0711) is no harm, and what `socket_uids` needs
            mode = f"others may read or change it (mode {status.st_mode & 0o777:04o})"
            raise _refused(directory, mode, f"chmod 700 {directory}")
        yield opened
    finally:
        os.close(opened)


def _read(directory: int, path: Path) -> UserSecret:
    """Raises `ConfigError` for a wrong file, `OSError` when there is none or it cannot be read."""
    file = path / SECRET_NAME
    try:
        # without O_NONBLOCK, opening a fifo would wait for its writer
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        opened = os.open(SECRET_NAME, flags, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refused(file, "is a symbolic link") from None
        if error.errno == errno.EACCES:
            raise _refused(file, "this user may not read it", f"remove it: rm {file}") from None
        raise
    try:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode):
            raise _refused(file, "is not a regular file")
        if status.st_uid != os.getuid():
            raise _refused(file, f"belongs to user {status.st_uid}, not to user {os.getuid()}")
        if status.st_mode & 0o077:
            mode = f"others may access it (mode {status.st_mode & 0o777:04o})"
            raise _refused(file, mode, f"remove it, since others may know it by now, and start again: rm {file}")
        content = os.read(opened, SECRET_FILE_BYTES_MAX)
    finally:
        os.close(opened)
    try:
        found = parse_secrets(content)
    except ValueError as wrong:
        raise _refused(file, str(wrong)) from None
    return UserSecret(secrets=found, path=file, mark=(status.st_mtime_ns, status.st_ino, status.st_size))


def _read_or_make(directory: int, path: Path, keep: bytes) -> UserSecret:
    for _ in range(ATTEMPTS):
        try:
            return _read(directory, path)
        except FileNotFoundError:
            _make(directory, keep or _random())
    raise OSError(errno.EAGAIN, "others go on to remove it")


def _make(directory: int, secret: bytes) -> None:
    """Put the file there with all of its content, unless somebody was quicker. Raises `OSError`."""
    fresh = f".{SECRET_NAME}-{secrets.token_hex(8)}"
    opened = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
    try:
        with os.fdopen(opened, "wb") as file:
            file.write(secret + b"\n")
        with suppress(FileExistsError):
            os.link(fresh, SECRET_NAME, src_dir_fd=directory, dst_dir_fd=directory)
    finally:
        os.unlink(fresh, dir_fd=directory)


def _refused(path: Path, why: str, hint: str | None = None) -> ConfigError:
    hint = hint or f"remove it, or set XDG_RUNTIME_DIR to a directory of this user, or set secret_file: {path}"
    return ConfigError(f"the secret of this user, {path}: {why}", key="secret_file", value=str(path), hint=hint)
