"""`kv_connector_extra_config`: what is accepted, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.errors import ConfigError
from kvxfer.integrations.vllm.settings import Settings


def test_what_is_accepted() -> None:
    made = Settings.of({"mode": "push", "timeout_s": 5, "kv_recompute_threshold": 64, "options": {"integrity": True}})
    assert (made.mode, made.timeout_s, made.kv_recompute_threshold) == ("push", 5.0, 64)
    assert made.options == {"integrity": True}
    assert Settings.of({}) == Settings()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mode", "pul"),
        ("mode", 3),
        ("socket", 7),
        ("lease_s", 0),
        ("lease_s", float("nan")),
        ("timeout_s", float("inf")),
        ("timeout_s", True),
        ("timeout_s", "5"),
        ("kv_recompute_threshold", -1),
        ("kv_recompute_threshold", 1.5),
        ("enforce_handshake_compat", "no"),
        ("own_memory", 1),
        ("options", [1]),
        ("options", {1: 2}),
    ],
)
def test_what_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key) as caught:
        Settings.of({key: value})
    assert caught.value.fields["key"] == key


def test_a_typo_is_told() -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.of({"timeout": 5})
    assert caught.value.hint == "did you mean timeout_s?"
