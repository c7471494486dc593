"""Putting a `Config` together from its sources, and remembering which value came from where."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvxfer.config.settings import BY_NAME, Config
from kvxfer.config.sources import known, read_environment, read_file, read_flags
from kvxfer.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A configuration and where each value came from: "default", "file PATH", "environment KEY" or "flag --KEY"."""

    config: Config
    origins: Mapping[str, str]
    warnings: tuple[str, ...]


def load(
    path: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Loaded:
    """Read the configuration: flags over environment over file over defaults.

    `path` falls back to $KVXFER_CONFIG, `env` to the process's environment; flags that are None were not given.
    Raises `ConfigError` for whatever is unknown or wrong; an unknown KVXFER_* variable is a warning only, since it may
    belong to another version.
    """
    env = os.environ if env is None else env
    path = path or env.get("KVXFER_CONFIG") or None
    values: dict[str, Any] = {}
    origins = dict.fromkeys(BY_NAME, "default")
    layers = [] if path is None else [(f"file {os.fspath(path)}", read_file(path))]
    from_env, warnings = read_environment(env, BY_NAME)
    for source, raw in [*layers, *from_env, *read_flags(flags or {}, BY_NAME)]:
        for name, value in raw.items():
            values[name] = known(name, source, BY_NAME).parse(value, source)
            origins[name] = source
    try:
        config = Config(**values)
        if config.secret_file:
            config.read_secrets()
    except ConfigError as wrong:
        keys = str(wrong.fields.get("keys") or wrong.fields.get("key")).split(",")
        wrong.fields["source"] = "; ".join(f"{key}: {origins.get(key, 'default')}" for key in keys)
        raise
    return Loaded(config=config, origins=origins, warnings=warnings)
