"""The places that configuration comes from: a TOML file, the environment, flags, and the file that holds the secret.

The idea: each reader returns raw values with the name of their source and judges only the names; `Option.parse` judges
the values. So every refusal can say where the wrong thing was written.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Mapping
from typing import Any

from kvxfer.config.options import Option, nearest
from kvxfer.errors import ConfigError

SECRET_BYTES_MIN = 16
SECRET_BYTES_MAX = 1024
SECRETS_MAX = 4  # in one file: the one in use, and those before and after it
SECRET_FILE_BYTES_MAX = SECRETS_MAX * (SECRET_BYTES_MAX + 2) + 1
_SECRET_BYTES = f"{SECRET_BYTES_MIN} to {SECRET_BYTES_MAX}"
Layers = list[tuple[str, dict[str, Any]]]


def known(name: str, source: str, options: Mapping[str, Option]) -> Option:
    """The option of this name, or a `ConfigError` with the nearest name."""
    option = options.get(name)
    if option is None:
        close = nearest(name, options)
        hint = f"did you mean {close}?" if close else None
        raise ConfigError(f"unknown option {name[:80]!r}", key=name[:80], source=source, hint=hint)
    return option


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The TOML file's keys and raw values. Raises `ConfigError`."""
    source = f"file {os.fspath(path)}"
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration: {error.strerror}", source=source) from error
    except (ValueError, RecursionError) as wrong:  # bad TOML, bad UTF-8, absurd numbers, absurd nesting
        hint = 'one NAME = VALUE a line, text in quotes: listen = "127.0.0.1:17800"'
        raise ConfigError(f"the configuration is not valid TOML: {wrong}", source=source, hint=hint) from wrong
    section = next((name for name, value in values.items() if isinstance(value, dict)), None)
    if section is not None:
        why = f"[{section[:80]}] is a section, and the configuration has none"
        raise ConfigError(why, key=section[:80], source=source, hint="put the options at the top of the file")
    return values


# Variables that are no options: where the file is, and where the libraries of accelerators are (read where they load).
OTHERS = ("KVXFER_CONFIG", "KVXFER_CANN_LIBDIR")
OTHER_PREFIXES = ("KVXFER_TEST_", "KVXFER_SIM_")  # of tests, and of simulated accelerators


def read_environment(env: Mapping[str, str], options: Mapping[str, Option]) -> tuple[Layers, tuple[str, ...]]:
    """What KVXFER_* variables say, as (source, values), and warnings about those that no option has."""
    found: Layers = []
    warnings: list[str] = []
    by_env = {option.env: option for option in options.values()}
    for key in sorted(env):
        if not key.startswith("KVXFER_") or key.startswith(OTHER_PREFIXES) or key in OTHERS:
            continue
        if key in by_env:
            found.append((f"environment {key}", {by_env[key].name: env[key]}))
            continue
        close = nearest(key.removeprefix("KVXFER_"), options)
        warnings.append(
            f"unknown environment variable {key[:80]}" + (f", did you mean {options[close].env}?" if close else "")
        )
    return found, tuple(warnings)


def read_flags(flags: Mapping[str, object], options: Mapping[str, Option]) -> Layers:
    """What flags say; None means not given. Raises `ConfigError` for secrets and unknown names."""
    found: Layers = []
    for key, value in flags.items():
        if value is None:
            continue
        name = key.removeprefix("--").replace("-", "_")
        source = "flag --" + name.replace("_", "-")
        if known(name, source, options).secret:
            why = "a command line can be read by every user of the host"
            raise ConfigError(
                f"{name} is not taken from a flag: {why}", key=name, source=source, hint="use secret_file"
            )
        found.append((source, {name: value}))
    return found


def read_regular_file(key: str, path: str, bytes_max: int, *, private: bool) -> bytes:
    """The content of a file as far as `bytes_max`; of a private one, when only its owner may access it.

    Raises `ConfigError` that names the option ``key``.
    """
    try:
        # without O_NONBLOCK, opening a fifo would wait for its writer
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _wrong_file(key, path, f"cannot be read: {error.strerror}") from error
    try:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode):
            raise _wrong_file(key, path, "not a regular file")
        if private and status.st_mode & 0o077:
            mode = f"others may access it (mode {status.st_mode & 0o777:04o})"
            raise _wrong_file(key, path, mode, f"chmod 600 {path}")
        return os.read(opened, bytes_max)
    except OSError as error:
        raise _wrong_file(key, path, f"cannot be read: {error.strerror}") from error
    finally:
        os.close(opened)


def read_secret_file(path: str, key: str = "secret_file") -> tuple[bytes, ...]:
    """The secrets in the file that ``key`` names, one a line. Raises `ConfigError`, also when others may read it."""
    content = read_regular_file(key, path, SECRET_FILE_BYTES_MAX, private=True)
    try:
        return parse_secrets(content)
    except ValueError as wrong:
        raise _wrong_file(key, path, str(wrong)) from None


def parse_secrets(content: bytes) -> tuple[bytes, ...]:
    """The secrets of such a file, each once. Raises `ValueError` that shows none of them."""
    lines = [line.rstrip(b"\r") for line in content.split(b"\n")]
    secrets = tuple(dict.fromkeys(line for line in lines if line))
    if not secrets:
        raise ValueError(f"holds 0 bytes; accepted: {_SECRET_BYTES}")
    if len(secrets) > SECRETS_MAX:
        raise ValueError(f"holds more than {SECRETS_MAX} lines, each of them a secret")
    for number, secret in enumerate(secrets, 1):
        if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
            where = f"secret {number} holds" if len(secrets) > 1 else "holds"
            raise ValueError(f"{where} {len(secret)} bytes; accepted: {_SECRET_BYTES} in a line")
    return secrets


def _wrong_file(key: str, path: str, why: str, hint: str | None = None) -> ConfigError:
    return ConfigError(f"bad value for {key}: {why}", key=key, value=path, hint=hint)
