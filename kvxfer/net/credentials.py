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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from kvxfer.config import Config
from kvxfer.config.sources import read_regular_file
from kvxfer.config.user_secret import NoPlace, UserSecret, find_user_secret, make_user_secret, secret_in_memory
from kvxfer.errors import ConfigError
from kvxfer.logs import logger
from kvxfer.net.keys import FILE_BYTES_MAX, NodeKeys
from kvxfer.net.tls import Channel, Contexts, Side, load_contexts

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
