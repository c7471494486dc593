"""Keys that belong to one node: with them a node proves itself, and can prove to be nobody else.

The idea: whoever runs the cluster keeps one root and gives each node two things derived from it: the node's own key,
and for each other node a key that only those two can have. The key of a pair is derived from the own key of one of the
two, with the id of the other. So a node can compute what others present to *it*, and never what others present to each
other; and a new node needs a file, while the files of the nodes that are there already need no change: it is enough
that one of the two has the other in its file.

Keys have a generation (the root they come from). Both sides say in the handshake which ones they have, so a new root is
in use between two nodes as soon as both have it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

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
