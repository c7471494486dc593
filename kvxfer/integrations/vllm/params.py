"""`kv_transfer_params`: the words that a router carries from the prefill engine to the decode engine, and their check.

The outer keys are vLLM's own, so that its example proxies work unchanged. What only kvxfer understands is in one entry,
"kvxfer". Everything may come from anywhere: it is checked here, and what is wrong is a `UsageError` that says what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer.errors import UsageError
from kvxfer.integrations.vllm.settings import TOKENS_MAX

FORMAT = 1
RANKS_MAX = 1024
ADDRESSES_MAX = 16
TEXT_CHARS_MAX = 4096
OURS = "kvxfer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """How one worker of an engine is reached: its node's addresses and the mailbox in which it reads."""

    node: tuple[str, ...]
    channel: str

    def to_dict(self) -> dict[str, Any]:
        return {"node": list(self.node), "channel": self.channel}

    @classmethod
    def from_dict(cls, raw: object) -> Rank:
        """Raises `UsageError`."""
        if not isinstance(raw, Mapping):
            raise _wrong("ranks", raw, "a list of nodes with channels")
        return cls(node=addresses(raw.get("node")), channel=_text("channel", raw.get("channel")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """A request that another engine has computed: which, how many tokens of it, and where its workers are."""

    engine_id: str
    request_id: str
    tokens: int
    mode: str
    compatibility: str
    ranks: tuple[Rank, ...]

    def to_params(self) -> dict[str, Any]:
        """What the prefill engine answers, in vLLM's words."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.request_id,
            "remote_num_tokens": self.tokens,
            "transfer_mode": self.mode,
            OURS: {
                "format": FORMAT,
                "compatibility": self.compatibility,
                "ranks": [rank.to_dict() for rank in self.ranks],
            },
        }

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Remote:
        """Raises `UsageError`: params of another connector, of another format, or malformed."""
        ours = params.get(OURS)
        if not isinstance(ours, Mapping):
            raise UsageError(
                "these kv_transfer_params are not of kvxfer's connector",
                field=OURS,
                value=", ".join(sorted(map(str, params)))[:200],
                hint="both engines must run KvxferConnector, and the router must hand on all that prefill answered",
            )
        if "error" in ours:
            raise UsageError(f"prefill could not hand over this request: {str(ours['error'])[:TEXT_CHARS_MAX]}")
        if ours.get("format") != FORMAT:
            raise _wrong("format", ours.get("format"), f"{FORMAT}, as this version of kvxfer writes it")
        ranks = ours.get("ranks")
        if not isinstance(ranks, list | tuple) or not 0 < len(ranks) <= RANKS_MAX:
            raise _wrong("ranks", ranks, f"a list of 1 to {RANKS_MAX} workers")
        tokens = params.get("remote_num_tokens")
        if not isinstance(tokens, int) or isinstance(tokens, bool) or not 0 < tokens <= TOKENS_MAX:
            raise _wrong("remote_num_tokens", tokens, "a number of tokens above 0")
        return cls(
            engine_id=_text("remote_engine_id", params.get("remote_engine_id")),
            request_id=_text("remote_request_id", params.get("remote_request_id")),
            tokens=tokens,
            mode=_text("transfer_mode", params.get("transfer_mode")),
            compatibility=_text("compatibility", ours.get("compatibility")),
            ranks=tuple(map(Rank.from_dict, ranks)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """A request that both engines got at once: the name under which they meet, and, for prefill, where decode is."""

    transfer_id: str
    node: tuple[str, ...] = ()
    ranks: int = 1

    @classmethod
    def from_params(cls, params: Mapping[str, Any], *, prefill: bool) -> Meeting:
        """Raises `UsageError`."""
        found = cls(transfer_id=_text("transfer_id", params.get("transfer_id")))
        if not prefill:
            return found
        ranks = params.get("remote_tp_size", 1)
        if not isinstance(ranks, int) or isinstance(ranks, bool) or not 0 < ranks <= RANKS_MAX:
            raise _wrong("remote_tp_size", ranks, f"a number of workers from 1 to {RANKS_MAX}")
        node = addresses(params.get("remote_node"), "remote_node")
        return cls(transfer_id=found.transfer_id, node=node, ranks=ranks)


def unavailable(reason: str) -> dict[str, Any]:
    """What prefill answers when nobody can fetch the request: decode then does what its policy says."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        OURS: {"format": FORMAT, "error": reason},
    }


def addresses(raw: object, name: str = "node") -> tuple[str, ...]:
    """The candidate addresses of a node, one or several. Raises `UsageError`."""
    found = (raw,) if isinstance(raw, str) else raw
    if not isinstance(found, Sequence) or not 0 < len(found) <= ADDRESSES_MAX:
        raise _wrong(name, raw, f"an address, or a list of at most {ADDRESSES_MAX}")
    return tuple(_text(name, one) for one in found)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= TEXT_CHARS_MAX:
        raise _wrong(name, value, f"text of 1 to {TEXT_CHARS_MAX} characters")
    return value


def _wrong(name: str, value: object, rule: str) -> UsageError:
    return UsageError(f"bad kv_transfer_params: {name} must be {rule}", field=name, value=repr(value)[:80])
