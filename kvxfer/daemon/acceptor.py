"""Incoming control connections: who may come in, how many, and how long they may take to say who they are.

The idea: a connection that has not proved itself costs a place among few, and when those are taken the oldest of the
address that has most of them goes (see `newcomers.py`), not the one that comes. A true peer needs milliseconds for its
handshake, so it gets through while somebody holds half-open connections; a flood of them is bounded and never reaches
the code behind.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Collection

from kvxfer.config import DEFAULT_NAMESPACE, Config
from kvxfer.daemon.newcomers import HalfOpenConnections, source_of
from kvxfer.errors import KvxferError, NotAllowed
from kvxfer.logs import logger
from kvxfer.net.credentials import Credentials
from kvxfer.net.link import Link, LocalIdentity, OnLink, OnMessage, Queues, Random
from kvxfer.wire.session import Facts, Limits, Session

# -- who may connect, once it has proved who it is: lists of nodes and of namespaces -----------------------------------
# The idea: one decision, taken by both sides of a connection at the end of its handshake, before anything is kept for
# it.


class Allowed:
    """The lists of one configuration. Its methods raise `NotAllowed`, and say what would have to be changed."""

    def __init__(self, config: Config) -> None:
        self._nodes = frozenset(config.allow_nodes)
        self._namespaces = frozenset((config.namespace, *config.allow_namespaces))

    def peer(self, identity: Facts) -> None:
        """A daemon, or a tool from another host. A tool without a namespace only looks."""
        if self._nodes and identity.node_id not in self._nodes:
            hint = "add it to allow_nodes of the node that refused"
            raise NotAllowed(
                "this node is not among those that may connect", node_id=identity.node_id or None, hint=hint
            )
        if identity.namespace or identity.role == "peer":
            self._check_namespace(identity.namespace or DEFAULT_NAMESPACE)

    def worker(self, identity: Facts) -> None:
        """A worker of this host; without a namespace it belongs to its daemon's."""
        if identity.namespace:
            self._check_namespace(identity.namespace)

    def _check_namespace(self, namespace: str) -> None:
        if namespace not in self._namespaces:
            hint = "set namespace alike on both sides, or add it to allow_namespaces of the one that refused"
            raise NotAllowed("this namespace is not among those that may connect", namespace=namespace, hint=hint)


log = logger("kvxfer.acceptor")


class Acceptor:
    """Serves one listening socket. ``links_max`` bounds what is open, `handshakes_max` what is half open.

    ``on_ready`` gets each link after its handshake. ``same_user`` (Unix sockets) admits this user, root and those of
    `socket_uids` only. ``credentials`` are what both sides must prove, ``authorise`` raises for who may not connect.
    ``limits`` are the durations of the sessions, by default the configuration's.
    """

    def __init__(
        self,
        config: Config,
        identity: LocalIdentity,
        *,
        roles: Collection[str],
        links_max: int,
        on_ready: OnLink,
        on_message: OnMessage,
        on_late: OnMessage | None = None,
        credentials: Credentials | None = None,
        authorise: Callable[[Facts], None] | None = None,
        same_user: bool = False,
        limits: Limits | None = None,
        queues: Queues | None = None,
        random: Random = secrets.token_bytes,
    ) -> None:
        self._config = config
        self._identity = identity
        self._roles = roles
        self._links_max = links_max
        self._on_ready = on_ready
        self._on_message = on_message
        self._on_late = on_late
        self._credentials = credentials
        self._authorise = authorise
        self._same_user = same_user
        self._limits: Limits = limits or config
        self._queues = queues
        self._random = random
        self._half_open: HalfOpenConnections[Link] = HalfOpenConnections()
        self._sockets: set[Link] = set()  # whatever still has one, those that are being closed too
        self._server: asyncio.Server | None = None
        self._stopped = False
        self.links: set[Link] = set()
        self.handshakes = 0
        self.refused: dict[str, int] = {}

    @property
    def half_open(self) -> int:
        """Connections whose handshake is not done."""
        return len(self._half_open)

    async def start(self, listener: socket.socket) -> None:
        """Accept on a listening socket, which belongs to the acceptor from here on."""
        loop = asyncio.get_running_loop()
        if listener.family == socket.AF_UNIX:
            self._server = await loop.create_unix_server(self._make, sock=listener)
        else:
            self._server = await loop.create_server(self._make, sock=listener)

    def stop(self) -> None:
        """Accept nothing more; what is half open is dropped, what is open stays."""
        self._stopped = True
        if self._server is not None:
            self._server.close()
            self._server = None
        for link in tuple(self._half_open):
            link.abort("this daemon is shutting down")

    def start_close(self, reason: str) -> None:
        """Stop, and say goodbye to everybody."""
        self.stop()
        for link in tuple(self.links):
            link.start_close(reason)

    async def aclose(self, reason: str) -> None:
        """The same, and wait until all connections are gone."""
        self.start_close(reason)
        for link in tuple(self._sockets):
            await link.wait_closed()

    def _make(self) -> Link:
        known = self._credentials
        session = Session(
            "acceptor",
            self._identity.session_identity(self._random),
            self._limits,
            nonce=self._random(32),
            now=asyncio.get_running_loop().time(),
            session_id=self._random(16).hex(),
            secret=known.secret if known else b"",
            more_secrets=known.secrets[1:] if known else (),
            keys=known.keys if known else None,
            accept_roles=self._roles,
            authorise=self._authorise,
        )
        return Link(
            session,
            self._config,
            on_message=self._on_message,
            on_late=self._on_late,
            on_connected=self._connected,
            on_ready=self._ready,
            channel=known.channel("acceptor") if known else None,
            queues=self._queues,
        )

    def _connected(self, link: Link) -> None:
        self._sockets.add(link)
        link.gone.add_done_callback(lambda _: self._sockets.discard(link))
        if self._stopped:
            link.abort("this daemon is shutting down")
            return
        if self._same_user and link.uid not in (os.getuid(), 0, *self._config.socket_users):
            self._count("user")
            log.warning("refused a connection of user %s (pid %s)", link.uid, link.pid)
            link.abort("another user")
            return
        full = len(self._sockets) > self._links_max
        if full and not self._half_open:
            self._count("links_max")
            link.abort("too many connections")
            return
        if full or len(self._half_open) >= self._config.handshakes_max:
            self._count("handshakes_max")
            self._displace()
        self._half_open.add(link, source_of(link.host))
        link.closed.add_done_callback(lambda reason: self._ended(link, reason.result()))

    def _displace(self) -> None:
        oldest = self._half_open.displaced()
        if oldest is not None:
            oldest.abort("too many unfinished handshakes")
            # Not when its callback runs: hundreds may be accepted before that, and each has to find another one.
            self._ended(oldest, oldest.closed.result())

    def _ready(self, link: Link) -> None:
        self._half_open.discard(link)
        self.links.add(link)
        self.handshakes += 1
        self._on_ready(link)

    def _ended(self, link: Link, reason: KvxferError) -> None:
        self.links.discard(link)
        if self._half_open.discard(link):
            self._count(reason.code)
            log.debug("handshake with %s failed: %s", link.name, reason)

    def _count(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1
