"""Bytes that must never change: for every message one frame, and two whole handshakes.

`python -m tests.wire.golden` adds what is missing, after a message was declared, and changes nothing that is there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvxfer.wire.framing import PREAMBLE
from kvxfer.wire.messages import MESSAGES, Message, encode
from kvxfer.wire.session import Facts, Session
from tests.wire.samples import full, raw

FOLDER = Path(__file__).parent / "golden"
MESSAGES_FILE, HANDSHAKES_FILE = FOLDER / "messages.json", FOLDER / "handshakes.json"
SECRETS = {"without secret": None, "with secret": b"a secret of 24 bytes ..."}
# What each version says, by the name under which it is recorded.
HANDSHAKES = {name: (secret, (1, 1)) for name, secret in SECRETS.items()}


class Limits:
    handshake_s, keepalive_s, keepalive_live_s, dead_s = 5.0, 10.0, 0.5, 2.0


def load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return loaded


def frames() -> dict[str, bytes]:
    return {name: bytes.fromhex(entry["frame"]) for name, entry in load(MESSAGES_FILE).items()}


def described(message: Message) -> dict[str, Any]:
    """The fields as JSON: bytes in hex behind a mark."""
    fields = raw(message)
    return {
        name: {"hex": value.hex()} if isinstance(value, bytes) else list(value) if isinstance(value, tuple) else value
        for name, value in fields.items()
    }


def ends(secret: bytes | None, versions: tuple[int, int]) -> tuple[Session, Session]:
    """A dialler and an acceptor with fixed facts and nonces."""
    common: dict[str, Any] = {"now": 0.0, "secret": secret, "versions": versions}
    me = Facts(node_id="0d" * 16, incarnation="1d" * 16, name="dialler", pid=41, engine_id="2d" * 16)
    you = Facts(node_id="0a" * 16, incarnation="1a" * 16)
    nonces = bytes(range(32)), bytes(range(32, 64))
    dialler = Session("dialler", me, Limits(), nonce=nonces[0], **common)
    acceptor = Session("acceptor", you, Limits(), nonce=nonces[1], session_id="5e" * 16, **common)
    return dialler, acceptor


def handshake(name: str) -> list[dict[str, str]]:
    """What each side sends, in order, until both are established."""
    dialler, acceptor = ends(*HANDSHAKES[name])
    sent = [{"from": "dialler", "bytes": PREAMBLE.hex()}]
    waiting = [(dialler, message) for message in dialler.start(0.0)]
    while waiting:
        sender, message = waiting.pop(0)
        sent.append({"from": sender.side, "bytes": encode(message).hex()})
        receiver = acceptor if sender is dialler else dialler
        waiting += [(receiver, answer) for answer in receiver.receive(message, 0.0).send]
    return sent


def add_missing() -> None:
    FOLDER.mkdir(exist_ok=True)
    known = load(MESSAGES_FILE)
    for number, declared in sorted(MESSAGES.items()):
        message = full(declared)
        entry = {"number": number, "fields": described(message), "frame": encode(message).hex()}
        known.setdefault(declared.__name__, entry)
    MESSAGES_FILE.write_text(json.dumps(known, indent=1) + "\n")
    known = load(HANDSHAKES_FILE)
    for name in HANDSHAKES:
        known.setdefault(name, handshake(name))
    HANDSHAKES_FILE.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    add_missing()
