"""What an operator sets in `kv_connector_extra_config`, checked when the engine starts.

Nothing is guessed: a key that nobody knows, or a value out of its range, is a `ConfigError` that names it, and the
engine does not start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvxfer.config.options import nearest
from kvxfer.errors import ConfigError

PULL, PUSH, LAYERWISE = "pull", "push", "layerwise"
MODES = (PULL, PUSH, LAYERWISE)
SECONDS_MAX = 24 * 3600.0
TOKENS_MAX = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``mode``: who moves the bytes. "pull": decode reads when prefill has ended. "push": prefill writes, after it has
    ended. "layerwise": prefill writes each layer while it computes, for routers that send a request to both sides at
    once; a request that comes the ordinary way is pulled.

    ``socket``: the Unix socket of this node's daemon; "": where the configuration of kvxfer says. ``lease_s``: how long
    prefill keeps blocks that nobody fetches. ``timeout_s``: how long a request may wait for its blocks, from being
    scheduled on; then it has failed. ``kv_recompute_threshold``: fewer tokens than this are computed and not moved.
    ``enforce_handshake_compat``: refuse requests of engines of another model, dtype or version of vLLM.
    ``own_memory``: the KV cache moves into memory of kvxfer, which other processes of the host map.
    ``options``: options of kvxfer's client, as in `kvxfer.toml` ("transports", "integrity", ...).
    """

    mode: str = PULL
    socket: str = ""
    lease_s: float = 60.0
    timeout_s: float = 30.0
    kv_recompute_threshold: int = 0
    enforce_handshake_compat: bool = True
    own_memory: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """The settings in a `kv_connector_extra_config`. Raises `ConfigError`."""
        known = {one.name for one in fields(cls)}
        for key in given:
            if key not in known:
                close = nearest(str(key), known)
                hint = f"did you mean {close}?" if close else f"known: {', '.join(sorted(known))}"
                raise _wrong(key, given[key], "a known key", hint)
        made: dict[str, Any] = {name: _CHECKS[name](name, value) for name, value in given.items()}
        return cls(**made)


def _wrong(key: object, value: object, accepted: str, hint: str | None = None) -> ConfigError:
    return ConfigError(
        f"bad kv_connector_extra_config: {key} must be {accepted}",
        key=str(key)[:80],
        value=repr(value)[:80],
        accepted=accepted,
        source="kv_connector_extra_config",
        hint=hint,
    )


def _mode(key: str, value: object) -> str:
    if not isinstance(value, str) or value not in MODES:
        raise _wrong(key, value, f"one of {', '.join(MODES)}")
    return value


def _text(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(key, value, "text")
    return value


def _seconds(key: str, value: object) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not 0 < float(value) <= SECONDS_MAX:  # type: ignore[arg-type]
        raise _wrong(key, value, f"a number of seconds above 0, at most {SECONDS_MAX:g}")
    return float(value)  # type: ignore[arg-type]


def _tokens(key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= TOKENS_MAX:
        raise _wrong(key, value, f"a number of tokens from 0 to {TOKENS_MAX}")
    return value


def _yes_or_no(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong(key, value, "true or false")
    return value


def _options(key: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise _wrong(key, value, "a table of options of kvxfer")
    return dict(value)  # each of them is checked where the client reads it


_CHECKS = {
    "mode": _mode,
    "socket": _text,
    "lease_s": _seconds,
    "timeout_s": _seconds,
    "kv_recompute_threshold": _tokens,
    "enforce_handshake_compat": _yes_or_no,
    "own_memory": _yes_or_no,
    "options": _options,
}
