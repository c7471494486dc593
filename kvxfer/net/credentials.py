"""What this node proves itself with: secrets, keys of its own, certificate, read again whenever their files change.

The idea: whoever dials or accepts asks for the current ones, and `accepts` says of an open connection whether what it
was proved with is still good. A new file that cannot be used changes nothing: what was read before stays in force, the
log says why, and a metric counts it. Where nothing is configured there is the secret of this user on this host, so no
daemon takes whoever comes.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvxfer.config import Config
from kvxfer.config.sources import read_regular_file
from kvxfer.config.user_secret import NoPlace, UserSecret, find_user_secret, make_user_secret, secret_in_memory
from kvxfer.errors import ConfigError
from kvxfer.logs import logger
from kvxfer.net.tls import Channel, Contexts, Side, load_contexts

# -- keys that belong to one node: with them a node proves itself, and can prove to be nobody else ---------------------
# The idea: whoever runs the cluster keeps one root and gives each node two things derived from it: the node's own
# key, and for each other node a key that only those two can have. The key of a pair is derived from the own key of
# one of the two, with the id of the other. So a node can compute what others present to *it*, and never what others
# present to each other; and a new node needs a file, while the files of the nodes that are there already need no
# change: it is enough that one of the two has the other in its file.
#
# Keys have a generation (the root they come from). Both sides say in the handshake which ones they have, so a new
# root is in use between two nodes as soon as both have it.


FEATURE = "keys-"
GENERATIONS_MAX, PEERS_MAX = 2, 4096
FILE_BYTES_MAX = 1 << 20
_HEADER = "kvxfer node keys 1"
_NODE = re.compile(r"[0-9a-f]{32}")
_LINES = {
    "node": re.compile(r"node ([0-9a-f]{32})"),
    "generation": re.compile(r"generation ([0-9a-f]{8}) ([0-9a-f]{64})"),
    "peer": re.compile(r"peer ([0-9a-f]{32}) ([0-9a-f]{64})"),
}


def _derive(key: bytes, what: str, of: str = "") -> bytes:
    """HKDF-Expand of RFC 5869 for one block: ``what`` and ``of`` say what it is for."""
    return hmac.new(key, b"\0".join((b"kvxfer", what.encode(), of.encode())) + b"\x01", hashlib.sha256).digest()


def _extract(root: bytes) -> bytes:
    return hmac.new(b"kvxfer node keys", root, hashlib.sha256).digest()


def node_named(name: str) -> str:
    """The id of a node by its name; an id stays what it is."""
    if _NODE.fullmatch(name):
        return name
    return hashlib.sha256(b"kvxfer node named\0" + name.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What one node has from one root."""

    name: str
    own: bytes = field(repr=False)
    peers: Mapping[str, bytes] = field(repr=False)

    def presented_to(self, node_id: str) -> bytes:
        """The key that ``node_id`` certainly has for us: it is in our file, so it is derived from its own key; or it
        is derived from ours, for one that has us in its file.
        """
        return self.peers.get(node_id) or _derive(self.own, "pair", node_id)

    def accepted_from(self, node_id: str) -> tuple[bytes, ...]:
        """The keys by which ``node_id`` is known to us."""
        derived = _derive(self.own, "pair", node_id)
        listed = self.peers.get(node_id)
        return (derived,) if listed is None else (listed, derived)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKeys:
    """The keys of one node, newest generation first."""

    node_id: str
    generations: tuple[Generation, ...]

    @classmethod
    def derive(cls, roots: Sequence[bytes], node_id: str, others: Iterable[str]) -> NodeKeys:
        """For the keeper of the roots, newest first."""
        peers = [other for other in dict.fromkeys(others) if other != node_id]
        return cls(node_id=node_id, generations=tuple(_generation(root, node_id, peers) for root in roots))

    @property
    def features(self) -> tuple[str, ...]:
        """What a handshake says about them: names of generations, which tell nothing about the keys."""
        return tuple(FEATURE + generation.name for generation in self.generations)

    def presented_to(self, node_id: str, features: Collection[str]) -> bytes:
        """The key of the newest generation that the other side says it has too; empty when there is none."""
        common = (one for one in self.generations if node_id and FEATURE + one.name in features)
        newest = next(common, None)
        return b"" if newest is None else newest.presented_to(node_id)

    def accepted_from(self, node_id: str) -> tuple[bytes, ...]:
        """All keys that prove to this node that the other one is ``node_id``."""
        if not node_id:
            return ()
        return tuple(key for generation in self.generations for key in generation.accepted_from(node_id))

    def render(self) -> str:
        """As the file holds them."""
        lines = [_HEADER, f"node {self.node_id}"]
        for generation in self.generations:
            lines.append(f"generation {generation.name} {generation.own.hex()}")
            lines += [f"peer {node_id} {key.hex()}" for node_id, key in sorted(generation.peers.items())]
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> NodeKeys:
        """What `render` wrote; comments (``#``) and empty lines are left out. Raises `ValueError` that shows no key."""
        lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1)]
        lines = [(number, line) for number, line in lines if line and not line.startswith("#")]
        if not lines or lines[0][1] != _HEADER:
            raise ValueError(f"the first line is not {_HEADER!r}")
        node_id, found = "", list[tuple[str, bytes, dict[str, bytes]]]()
        for number, line in lines[1:]:
            match = _LINES.get(line.partition(" ")[0], _LINES["node"]).fullmatch(line)
            if match is None:
                raise ValueError(f"line {number} is none of node, generation and peer with their values")
            word = line.partition(" ")[0]
            if word == "node":
                if node_id:
                    raise ValueError(f"line {number} names a second node")
                node_id = match[1]
            elif word == "generation":
                found.append((match[1], bytes.fromhex(match[2]), {}))
            elif not found:
                raise ValueError(f"line {number} comes before the first generation")
            else:
                found[-1][2][match[1]] = bytes.fromhex(match[2])
        _check(node_id, found)
        made = [Generation(name=name, own=own, peers=peers) for name, own, peers in found]
        return cls(node_id=node_id, generations=tuple(made))


def _generation(root: bytes, node_id: str, peers: Iterable[str]) -> Generation:
    secret = _extract(root)
    own = _derive(secret, "node", node_id)
    keys = {peer: _derive(_derive(secret, "node", peer), "pair", node_id) for peer in peers}
    return Generation(name=_derive(secret, "generation").hex()[:8], own=own, peers=keys)


def _check(node_id: str, generations: Sequence[tuple[str, bytes, Mapping[str, bytes]]]) -> None:
    names = {name for name, _, _ in generations}
    if not node_id:
        raise ValueError("it does not say which node it is for")
    if not 1 <= len(generations) <= GENERATIONS_MAX or len(names) < len(generations):
        raise ValueError(f"it holds {len(generations)} generations; accepted: 1 to {GENERATIONS_MAX} different ones")
    if any(len(peers) > PEERS_MAX for _, _, peers in generations):
        raise ValueError(f"it holds more than {PEERS_MAX} peers")
    if any(node_id in peers for _, _, peers in generations):
        raise ValueError("it lists its own node among the peers")


TLS, SECRET, KEYS = "tls", "secret", "node_keys"
DAY_S = 86400

# Without anything configured: take the user's secret, and make it if need be; the same, and one in memory where it
# cannot be kept; take it if it is there, and change nothing; take none (there is no other user, as in a simulation).
Unconfigured = Literal["make", "make or remember", "look", "none"]
Signature = tuple[tuple[int, int, int] | int, ...]

log = logger("kvxfer.credentials")


class Credentials:
    """Secrets, keys and certificate by the options of a configuration. Raises `ConfigError` when they cannot be used.

    ``unconfigured`` says what takes their place when no option names any. ``wall`` gives Unix time. ``failures``
    counts, for `tls`, `secret` and `node_keys`, new files that could not be used, ``reloads`` those that could.
    """

    def __init__(
        self, config: Config, *, unconfigured: Unconfigured = "make", wall: Callable[[], float] = time.time
    ) -> None:
        self._config = config
        self._wall = wall
        self._unconfigured: Unconfigured = "none" if config.has_proof else unconfigured
        self._files = {
            TLS: tuple(path for path in (config.tls_cert, config.tls_key, config.tls_ca) if path),
            SECRET: (config.secret_file,) if config.secret_file else (),
            KEYS: (config.node_keys_file,) if config.node_keys_file else (),
        }
        self._seen = {what: signature(paths) for what, paths in self._files.items()}
        self.secrets: tuple[bytes, ...] = ()
        self.secrets = self._read_secrets()
        self._contexts = self._read_contexts()
        self.keys: NodeKeys | None = None
        self.keys = self._read_keys(self.node_id)
        self._authorities = _content(config.tls_ca)
        self.authorities = 0  # grows whenever the file of authorities has another content
        self.failures = dict.fromkeys(self._files, 0)
        self.reloads = dict.fromkeys(self._files, 0)

    def __repr__(self) -> str:
        return f"<Credentials secrets={len(self.secrets)} keys={self.keys is not None} tls={self.uses_tls}>"

    @property
    def secret(self) -> bytes:
        """The secret that this side uses; empty: none."""
        return self.secrets[0] if self.secrets else b""

    @property
    def uses_tls(self) -> bool:
        return self._contexts is not None

    @property
    def node_id(self) -> str:
        """The node that the certificate or the keys are for; empty without them."""
        if self._contexts is not None:
            return self._contexts.own.node_id
        return "" if self.keys is None else self.keys.node_id

    @property
    def expires_in_s(self) -> float | None:
        """Until the certificate is no longer valid; negative when it is not any more, None without one."""
        return None if self._contexts is None else self._contexts.own.expires_at - self._wall()

    @property
    def watches(self) -> bool:
        """There are files that may change."""
        return any(self._files.values())

    def channel(self, side: Side) -> Channel | None:
        """TLS for one more connection; None without a certificate."""
        return None if self._contexts is None else Channel(self._contexts.of(side), side, self.authorities)

    def poll(self) -> None:
        """Read again what has changed since the last look."""
        for what, paths in self._files.items():
            found = signature(paths)
            if found != self._seen[what]:
                self._seen[what] = found
                self._reload(what)

    def reload(self) -> None:
        """Read everything again, changed or not."""
        for what, paths in self._files.items():
            self._seen[what] = signature(paths)
            if paths:
                self._reload(what)

    def _reload(self, what: str) -> None:
        try:
            if what == TLS:
                self._contexts = self._read_contexts(self.node_id)
                self._count_authorities()
            elif what == KEYS:
                self.keys = self._read_keys(self.node_id)
            else:
                self.secrets = self._read_secrets()
        except ConfigError as refused:
            self.failures[what] += 1
            log.error("the new files of %s cannot be used, the old ones stay in force: %s", what, refused)
            return
        self.reloads[what] += 1
        if what == KEYS and self.keys is not None:
            log.info("the node's keys were read again; generations %s", ", ".join(self.keys.features))
        elif self.expires_in_s is not None and what == TLS:
            log.info("the certificate was read again; it expires in %.1f days", self.expires_in_s / DAY_S)
        else:
            log.info("the shared secret was read again; %d are accepted", len(self.secrets))

    def accepts(self, proved_with: bytes, authorities: int | None, node_id: str = "") -> bool:
        """Whether a connection that was proved so would be made again now, as far as that can be told.

        Who signed a certificate is known during a handshake only, so after a change of authorities none counts.
        """
        if authorities is not None and authorities != self.authorities:
            return False
        good = (*self.secrets, *(() if self.keys is None else self.keys.accepted_from(node_id)))
        known = [secret for secret in good if hmac.compare_digest(secret, proved_with)]
        return bool(known) if self.secrets or self.keys is not None else True

    def _count_authorities(self) -> None:
        content = _content(self._config.tls_ca)
        if content != self._authorities:
            self._authorities = content
            self.authorities += 1

    def _read_secrets(self) -> tuple[bytes, ...]:
        """Those that are configured, else the user's. What we use already is put back when its file has gone."""
        if self._unconfigured == "none":
            return self._config.read_secrets()
        looks = self._unconfigured == "look"
        found = find_user_secret(self._config) if looks else self._make_user_secret()
        if found is None:
            return self.secrets or (secret_in_memory(),)
        self._files[SECRET] = () if found.path is None else (str(found.path),)  # it may lie elsewhere by now
        self._seen[SECRET] = () if found.path is None else (found.mark,)
        return found.secrets

    def _make_user_secret(self) -> UserSecret:
        try:
            return make_user_secret(self._config, keep=self.secret)
        except NoPlace as nowhere:
            if self._unconfigured == "make":
                raise
            log.warning("only this process can connect to its own daemons: %s", nowhere.message)
            return UserSecret(secrets=self.secrets or (secret_in_memory(),), path=None)

    def _read_contexts(self, node_id: str = "") -> Contexts | None:
        config = self._config
        if not config.tls_cert:
            return None
        contexts = load_contexts(config.tls_cert, config.tls_key, config.tls_ca)
        if node_id and contexts.own.node_id != node_id:
            why = "the new certificate is for another node than this one"
            raise ConfigError(why, key="tls_cert", running=node_id, certificate=contexts.own.node_id)
        return contexts

    def _read_keys(self, node_id: str) -> NodeKeys | None:
        path = self._config.node_keys_file
        if not path:
            return None
        content = read_regular_file("node_keys_file", path, FILE_BYTES_MAX, private=True)
        try:
            found = NodeKeys.parse(content.decode("ascii", "replace"))
        except ValueError as wrong:
            why = f"bad value for node_keys_file: {wrong}"
            raise ConfigError(why, key="node_keys_file", value=path, hint="write it with `kvxfer keys`") from None
        if node_id and found.node_id != node_id:
            why = "these node keys are for another node than this one"
            raise ConfigError(why, key="node_keys_file", running=node_id, keys=found.node_id)
        return found


def _content(path: str) -> bytes:
    """What tells whether a file says the same as before. One that has just gone says something else."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).digest() if path else b""
    except OSError:
        return b""


def signature(paths: tuple[str, ...]) -> Signature:
    """What changes when one of the files is written or replaced; links are followed."""
    found: list[tuple[int, int, int] | int] = []
    for path in paths:
        try:
            status = os.stat(path)
        except OSError as gone:
            found.append(gone.errno or 0)
        else:
            found.append((status.st_mtime_ns, status.st_ino, status.st_size))
    return tuple(found)
