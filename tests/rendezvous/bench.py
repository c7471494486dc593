"""A registry with two workers, a peer and a clock, for the tests of its parts. Each call is followed by `check()`."""

from __future__ import annotations

import itertools
from typing import Any

from kvxfer.config import Config
from kvxfer.errors import KvxferError
from kvxfer.rendezvous.actions import Action, Claimed, Link, Notify, Posted, Refused
from kvxfer.rendezvous.registry import Registry

HERE, THERE, FAR = "a" * 32, "c" * 32, "f" * 32
NOW_INCARNATION, THEIR_INCARNATION = "b" * 32, "d" * 32


class Bench:
    """A registry with a worker `own`, a worker `other`, a link `peer` to THERE, and a clock."""

    def __init__(self, **changes: Any) -> None:
        numbers = itertools.count(1)
        self.registry = Registry(
            Config(**changes),
            node_id=HERE,
            incarnation=NOW_INCARNATION,
            random=lambda size: next(numbers).to_bytes(size, "big"),
        )
        self.now = 0.0
        self._rid = 0
        self.registry.add_worker("own", "decode-0")
        self.registry.add_worker("other", "prefill-0")
        self.registry.add_peer(0.0, "peer", THERE, THEIR_INCARNATION, "node-c")

    def rid(self) -> int:
        self._rid += 1
        return self._rid

    def checked(self, actions: list[Action]) -> list[Action]:
        self.registry.check()
        return actions

    def post(self, link: Link = "own", kind: str = "offer", key: str = "R", **more: Any) -> list[Action]:
        return self.checked(self.registry.post(self.now, link, self.rid(), kind=kind, key=key, **more))

    def posted(self, link: Link = "own", kind: str = "offer", key: str = "R", **more: Any) -> Posted:
        (answer,) = self.post(link, kind, key, **more)
        assert isinstance(answer, Posted)
        return answer

    def claim(self, link: Link = "peer", kind: str = "offer", key: str = "R", **more: Any) -> list[Action]:
        if "posting" in more:
            key = ""
        return self.checked(self.registry.claim(self.now, link, self.rid(), kind=kind, key=key, **more))

    def claimed(self, link: Link = "peer", kind: str = "offer", key: str = "R", **more: Any) -> Claimed:
        notice, answer = self.claim(link, kind, key, **more)  # the owner is told first
        assert isinstance(answer, Claimed)
        assert isinstance(notice, Notify)
        assert (notice.what, notice.claim) == ("claimed", answer.claim)
        return answer

    def settle(self, answer: Claimed, outcome: str = "done", link: Link | None = None, **more: Any) -> list[Action]:
        return self.checked(
            self.registry.settle(
                self.now,
                answer.link if link is None else link,
                self.rid(),
                posting=answer.posting,
                claim=answer.claim,
                outcome=outcome,
                **more,
            )
        )

    def remove(self, link: Link) -> list[Action]:
        return self.checked(self.registry.remove(self.now, link))

    def expire(self, now: float) -> list[Action]:
        self.now = now
        return self.checked(self.registry.expire(now))


def refusal(actions: list[Action]) -> KvxferError:
    (answer,) = actions
    assert isinstance(answer, Refused)
    return answer.error


def told(actions: list[Action]) -> list[tuple[Link, str, int, str]]:
    return [(item.link, item.what, item.claim, item.code) for item in actions if isinstance(item, Notify)]
