"""What the scheduler side tells the workers, once for each step of the engine. Plain values that are pickled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvxfer.integrations.vllm.params import Meeting, Remote

NULL_BLOCK = 0  # vLLM's place holder for blocks that a sliding window has left behind


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Tokens ``first`` to ``first + tokens - 1`` of a request lie in ``blocks``, from slot ``slot`` of the first on."""

    blocks: tuple[int, ...]
    first: int
    tokens: int
    slot: int

    @classmethod
    def of(cls, blocks: Sequence[int], block_tokens: int, first: int, stop: int) -> Table:
        """The part from token ``first`` up to ``stop`` of a request, whose block i holds the tokens from
        ``i * block_tokens`` on. Leading blocks that the sliding window has left behind are not part of it; nothing is
        left when all are.
        """
        held = blocks[first // block_tokens : -(-stop // block_tokens)]
        gone = next((index for index, block in enumerate(held) if block != NULL_BLOCK), len(held))
        if gone:
            first = (first // block_tokens + gone) * block_tokens
        kept = tuple(held[gone:])
        stop = min(stop, (first // block_tokens + len(kept)) * block_tokens)
        return cls(blocks=kept, first=first, tokens=max(stop - first, 0), slot=first % block_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """Blocks to be filled, a table for each group; ``refused`` says why that cannot be."""

    remote: Remote | None
    tables: tuple[Table, ...]
    meeting: Meeting | None = None
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOrder:
    """Blocks of a request that has ended here; they are kept until they were fetched, or the lease ends."""

    tables: tuple[Table, ...]
    mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The step that comes computes the last tokens of this prompt: each layer is written as it becomes ready."""

    tables: tuple[Table, ...]
    meeting: Meeting


@dataclass(slots=True, kw_only=True)
class Orders:
    """``dropped``: computed elsewhere, and not wanted after all. ``stopped``: their blocks are taken away in this step.
    ``cancelled``: streams of requests that were aborted.
    """

    receive: dict[str, Receive] = field(default_factory=dict)
    send: dict[str, SendOrder] = field(default_factory=dict)
    stream: dict[str, Stream] = field(default_factory=dict)
    dropped: list[Remote] = field(default_factory=list)
    stopped: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)
