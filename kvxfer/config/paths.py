"""Where the daemon's socket lives, and a directory for it that nobody else can enter.

The idea: the directory is the access control of the Unix socket, so it is made with mode 0700, belongs to us, and
anything else about it is refused with the reason instead of being repaired behind the operator's back.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kvxfer.config import SOCKET_DIR_CHARS_MAX, Config
from kvxfer.errors import ConfigError

SOCKET_NAME = "kvxferd.sock"
SHARED_MEMORY = "/dev/shm"
SCRATCH_SUFFIX_CHARS = 9  # a slash and what mkdtemp adds


def socket_dir(config: Config, env: Mapping[str, str] | None = None) -> Path:
    """The configured directory, $KVXFER_SOCKET_DIR, $XDG_RUNTIME_DIR/kvxfer or /tmp/kvxfer-<uid>; touches nothing."""
    env = os.environ if env is None else env
    if config.socket_dir:
        return Path(config.socket_dir)
    if env.get("KVXFER_SOCKET_DIR"):
        return _checked(Path(env["KVXFER_SOCKET_DIR"]), "environment KVXFER_SOCKET_DIR")
    runtime = env.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/") and len(runtime) + len("/kvxfer") <= SOCKET_DIR_CHARS_MAX:
        return Path(runtime) / "kvxfer"
    return Path(f"/tmp/kvxfer-{os.getuid()}")


def daemon_socket(directory: Path) -> Path:
    """The path of the daemon's Unix socket."""
    return directory / SOCKET_NAME


def counters_path(directory: Path, engine_id: bytes) -> Path:
    """Where an engine keeps the counters that the daemon reads at a scrape."""
    return directory / f"c-{engine_id.hex()[:12]}.counters"


def engine_dir(directory: Path) -> Path:
    """Where a worker's engine has its files: beside the daemon's socket, or, where this user may make none,
    in a directory of its own. Raises `ConfigError`.
    """
    if os.access(directory, os.W_OK | os.X_OK) or not directory.exists():
        return directory
    return ensure_socket_dir(Path(f"/tmp/kvxfer-{os.getuid()}"))


def ensure_socket_dir(path: Path, *, shared: bool = False) -> Path:
    """Make the directory (mode 0700) if it is missing, and check that it is ours alone. Raises `ConfigError`.

    ``shared`` (the socket takes other users): its mode is 0711, so that they may pass through, and see or make nothing.
    """
    try:
        path.mkdir(mode=0o700)
        if shared:
            path.chmod(0o711)
    except FileExistsError:
        pass
    except FileNotFoundError as error:
        gone = not path.parent.exists()
        why = f"its parent {path.parent} does not exist" if gone else "cannot be made there"
        raise _refused(path, why, "create it, or set another socket_dir") from error
    except NotADirectoryError as error:
        raise _refused(path, f"{path.parent} is not a directory") from error
    except OSError as error:
        why = "the file system is read-only" if error.errno == errno.EROFS else f"cannot be made: {error.strerror}"
        raise _refused(path, why, "set socket_dir to a place where this user may write") from error
    check_socket_dir(path, shared=shared)
    if not os.access(path, os.W_OK | os.X_OK):
        raise _refused(path, "this user may not write there", "set another socket_dir")
    if shared and not path.stat().st_mode & 0o011:  # it was made for something else before, such as this user's secret
        path.chmod(0o711)
    return path


def make_scratch_dir(prefix: str, env: Mapping[str, str] | None = None, *, below: str = "") -> Path:
    """A fresh directory (mode 0700) for what ends with this process, short enough for sockets in it, or in ``below``.

    Where temporary files lie, else in the user's runtime directory, else in shared memory, which can be written where
    the root is read-only. Raises `ConfigError` that says what was tried.
    """
    tried = []
    for place in _scratch_places(os.environ if env is None else env):
        if len(place) + len(prefix) + SCRATCH_SUFFIX_CHARS + len(below) > SOCKET_DIR_CHARS_MAX:
            tried.append(f"{place}: too long for a socket")
            continue
        try:
            return Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        except OSError as error:
            tried.append(f"{place}: {error.strerror}")
    why = f"there is no place for a socket directory that ends with this process: {'; '.join(tried)}"
    raise ConfigError(why, key="socket_dir", hint="set TMPDIR to a directory that this user can write")


def _scratch_places(env: Mapping[str, str]) -> tuple[str, ...]:
    try:
        usual = tempfile.gettempdir()
    except OSError:  # it has tried all that it knows
        usual = env.get("TMPDIR") or "/tmp"
    runtime = env.get("XDG_RUNTIME_DIR", "")
    return tuple(dict.fromkeys((usual, "/tmp", *((runtime,) if runtime.startswith("/") else ()), SHARED_MEMORY)))


def check_socket_dir(path: Path, *, shared: bool = False) -> None:
    """Refuse a directory that others could have prepared or can enter. A client calls it before using it."""
    try:
        status = path.lstat()
    except OSError as error:
        raise _refused(path, f"cannot be used: {error.strerror}") from error
    if stat.S_ISLNK(status.st_mode):
        raise _refused(path, "is a symbolic link", f"set socket_dir to {path.resolve()}")
    if not stat.S_ISDIR(status.st_mode):
        raise _refused(path, "is not a directory")
    if status.st_uid != os.getuid():
        raise _refused(
            path, f"belongs to user {status.st_uid}, not to user {os.getuid()}", "remove it, or set another socket_dir"
        )
    if status.st_mode & (0o066 if shared else 0o077):
        public = status.st_mode & stat.S_ISVTX  # such as /tmp: to close it would break the host
        hint = f"set socket_dir to a directory below it, {path}/kvxfer" if public else f"chmod 700 {path}"
        raise _refused(path, f"others may enter it (mode {status.st_mode & 0o777:04o})", hint)


def _checked(path: Path, source: str) -> Path:
    if not path.is_absolute() or len(str(path)) > SOCKET_DIR_CHARS_MAX:
        why = f"must be an absolute path of at most {SOCKET_DIR_CHARS_MAX} characters"
        raise ConfigError(f"bad value for socket_dir: {why}", key="socket_dir", value=str(path)[:120], source=source)
    return path


def _refused(path: Path, why: str, hint: str | None = None) -> ConfigError:
    return ConfigError(f"socket directory {path}: {why}", key="socket_dir", value=str(path), hint=hint)
