"""Who may connect, once it has proved who it is: lists of nodes and of namespaces.

The idea: one decision, taken by both sides of a connection at the end of its handshake, before anything is kept for it.
"""

from __future__ import annotations

from kvxfer.config import DEFAULT_NAMESPACE, Config
from kvxfer.errors import NotAllowed
from kvxfer.wire.session import Facts


class Allowed:
    """The lists of one configuration. Its methods raise `NotAllowed`, and say what would have to be changed."""

    def __init__(self, config: Config) -> None:
        self._nodes = frozenset(config.allow_nodes)
        self._namespaces = frozenset((config.namespace, *config.allow_namespaces))

    def peer(self, facts: Facts) -> None:
        """A daemon, or a tool from another host. A tool without a namespace only looks."""
        if self._nodes and facts.node_id not in self._nodes:
            hint = "add it to allow_nodes of the node that refused"
            raise NotAllowed("this node is not among those that may connect", node_id=facts.node_id or None, hint=hint)
        if facts.namespace or facts.role == "peer":
            self._check_namespace(facts.namespace or DEFAULT_NAMESPACE)

    def worker(self, facts: Facts) -> None:
        """A worker of this host; without a namespace it belongs to its daemon's."""
        if facts.namespace:
            self._check_namespace(facts.namespace)

    def _check_namespace(self, namespace: str) -> None:
        if namespace not in self._namespaces:
            hint = "set namespace alike on both sides, or add it to allow_namespaces of the one that refused"
            raise NotAllowed("this namespace is not among those that may connect", namespace=namespace, hint=hint)
