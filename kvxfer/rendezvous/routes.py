"""The claims that our workers hold on postings of other nodes, so that events about them find their worker.

The idea: a claim is named by (node, posting, number). Posting ids are random, but whoever has seen one may answer with
it; what one node says is never about a claim at another.
"""

from __future__ import annotations

from collections import Counter

from kvxfer.rendezvous.actions import Notify
from kvxfer.rendezvous.postings import ClaimKey, Party, RemoteClaim


class RemoteClaims:
    """All routes of one daemon. Nothing here has a deadline: a route ends with its claim or with its worker."""

    def __init__(self) -> None:
        self._by_node: dict[str, dict[ClaimKey, RemoteClaim]] = {}
        self._nodes: Counter[ClaimKey] = Counter()  # at how many nodes there is a claim with this name
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def get(self, node_id: str, key: ClaimKey) -> RemoteClaim | None:
        """Our claim with this name at that node."""
        return self._by_node.get(node_id, {}).get(key)

    def known(self, key: ClaimKey) -> bool:
        """Some worker has a claim with this name, at some node."""
        return key in self._nodes

    def all(self) -> list[RemoteClaim]:
        return [route for of_node in self._by_node.values() for route in of_node.values()]

    def live_to(self, node_id: str) -> int:
        """Claims on postings of this node."""
        return len(self._by_node.get(node_id, ()))

    def conflict(self, party: Party, node_id: str, key: ClaimKey) -> bool:
        """Whether a node has granted what it cannot: another worker's claim, or one with the name that this worker's
        claim at another node has. A worker tells its claims apart by posting and number alone.
        """
        old, own = self.get(node_id, key), party.routes.get(key)
        return (old is not None and old.party is not party) or (own is not None and own.node_id != node_id)

    def add(self, party: Party, node_id: str, key: ClaimKey, rid: int = 0) -> RemoteClaim:
        """Remember a claim that is in no `conflict`; the same claim again replaces the earlier route."""
        old = self.get(node_id, key)
        if old is not None:
            self.drop(old)
        route = RemoteClaim(key, node_id, party, rid)
        party.routes[key] = route
        party.asked(rid, route)
        self._by_node.setdefault(node_id, {})[key] = route
        self._nodes[key] += 1
        self._count += 1
        return route

    def drop(self, route: RemoteClaim) -> None:
        del route.party.routes[route.key]
        route.party.forget_request(route)
        of_node = self._by_node[route.node_id]
        del of_node[route.key]
        if not of_node:
            del self._by_node[route.node_id]
        self._count -= 1
        self._nodes[route.key] -= 1
        if not self._nodes[route.key]:
            del self._nodes[route.key]

    def orphan(self, node_id: str) -> list[Notify]:
        """The node is out of reach; its claims stay, since the data path may still work."""
        return [
            Notify(link=route.party.link, posting=route.key[0], claim=route.key[1], what="orphaned", code="peer_lost")
            for route in self._by_node.get(node_id, {}).values()
        ]

    def check(self) -> None:
        """Assert internal consistency."""
        for node_id, of_node in self._by_node.items():
            assert of_node
            for key, route in of_node.items():
                assert (route.node_id, route.key) == (node_id, key)
                assert route.party.routes[key] is route
        assert sum(map(len, self._by_node.values())) == self._count == self._nodes.total()
        assert all(self._nodes.values())
