"""The claims that our workers hold on postings of other nodes, so that events about them find their worker.

The idea: a claim is named by (posting, number), and posting ids are random, so the name is unique without the node;
the node is kept to check that an event comes from where the claim was made.
"""

from __future__ import annotations

from kvxfer.rendezvous.actions import Notify
from kvxfer.rendezvous.postings import ClaimKey, Party, Route


class Routes:
    """All routes of one daemon. Nothing here has a deadline: a route ends with its claim or with its worker."""

    def __init__(self) -> None:
        self._routes: dict[ClaimKey, Route] = {}
        self._by_node: dict[str, dict[ClaimKey, Route]] = {}

    def __len__(self) -> int:
        return len(self._routes)

    def get(self, key: ClaimKey) -> Route | None:
        return self._routes.get(key)

    def all(self) -> list[Route]:
        return list(self._routes.values())

    def live_to(self, node_id: str) -> int:
        """Claims on postings of this node."""
        return len(self._by_node.get(node_id, ()))

    def add(self, party: Party, node_id: str, key: ClaimKey, rid: int = 0) -> Route:
        """Remember a claim; the same claim again replaces the earlier route."""
        old = self._routes.get(key)
        if old is not None:
            self.drop(old)
        route = Route(key, node_id, party, rid)
        self._routes[key] = party.routes[key] = route
        party.asked(rid, route)
        self._by_node.setdefault(node_id, {})[key] = route
        return route

    def drop(self, route: Route) -> None:
        del self._routes[route.key], route.party.routes[route.key]
        route.party.forget_request(route)
        of_node = self._by_node[route.node_id]
        del of_node[route.key]
        if not of_node:
            del self._by_node[route.node_id]

    def orphan(self, node_id: str) -> list[Notify]:
        """The node is out of reach; its claims stay, since the data path may still work."""
        return [
            Notify(link=route.party.link, posting=route.key[0], claim=route.key[1], what="orphaned", code="peer_lost")
            for route in self._by_node.get(node_id, {}).values()
        ]

    def check(self) -> None:
        """Assert internal consistency."""
        for key, route in self._routes.items():
            assert route.key == key
            assert route.party.routes[key] is route
            assert self._by_node[route.node_id][key] is route
        assert all(self._by_node.values())
        assert sum(map(len, self._by_node.values())) == len(self._routes)
