"""Peers of the native engine: connections to other engines, and the grants of theirs that are imported through them."""

from __future__ import annotations

import asyncio

from kvxfer.native._shim import ffi, lib
from kvxfer.native.facts import Event, EventKind
from kvxfer.native.life import Life
from kvxfer.native.status import Status, error_for, limit_reached


class Connections(Life):
    """A part of `Engine`: peers and imports."""

    def connect(self, transport: int, endpoint: str, secret: bytes | None = None) -> tuple[int, asyncio.Future[Event]]:
        """Start to connect; a peer handle and the future of its outcome. A failed one needs no `close_peer`.

        ``secret``: what goes with the endpoint of an engine that encrypts, see `TransportInfo.secret`.
        """
        engine = self._require_loop()
        told = ffi.NULL if secret is None else ffi.new("uint8_t[32]", secret)
        status = lib.kvx_peer_connect(engine, transport, endpoint.encode(), told, self._id_p, self._token_p)
        if status == Status.LIMIT:
            raise limit_reached("connect", "peers_max", self.config.peers_max, "try again when some are closed")
        if status != 0:
            raise error_for(status, what="connect", endpoint=endpoint)
        return self._id_p[0], self._future(self._token_p[0])

    def close_peer(self, peer: int) -> asyncio.Future[Event]:
        """End a connection: its transfers complete, its imports go. One that is gone already resolves at once."""
        engine = self._require_loop()
        status = lib.kvx_peer_close(engine, peer, self._token_p)
        if status == Status.NO_PEER:
            assert self._loop is not None
            gone = self._loop.create_future()
            gone.set_result(Event(EventKind.PEER_CLOSED, 0, 0, peer, 0, 0, 0, 0, -1))
            return gone
        if status != 0:
            raise error_for(status, what="close_peer")
        return self._future(self._token_p[0])

    def import_(
        self, peer: int, *, grant: int, generation: int, length: int, access: int, key: bytes, mapped: bool = False
    ) -> tuple[int, asyncio.Future[Event]]:
        """Start to make a remote grant usable; an import handle and the future of its outcome. ``mapped``: a device's
        memory for `device_mapping`, or it fails.
        """
        engine = self._require_loop()
        remote = ffi.new("kvx_remote *", {"grant": grant, "generation": generation, "length": length, "access": access})
        remote.key, remote.flags = key, int(mapped)
        status = lib.kvx_mem_import(engine, peer, remote, self._id_p, self._token_p)
        if status != 0:
            raise error_for(status, what="import", grant=grant)
        return self._id_p[0], self._future(self._token_p[0])

    def device_mapping(self, import_: int) -> tuple[int, int] | None:
        """Of memory on a device that was imported with ``mapped``: its address, and the number of the device here that
        may use it. None when the import is of host memory, or not mapped.
        """
        info = ffi.new("kvx_import_info *")
        status = lib.kvx_import_query(self._mine(), import_, info)
        if status != 0:
            raise error_for(status, what="device_mapping")
        return (int(info.address), int(info.device)) if info.address and info.device >= 0 else None

    def mapping(self, import_: int) -> memoryview | None:
        """The imported memory itself, read-only unless the grant allows writes; None when the transport cannot map.

        After `release_import`, or when the owner takes the memory back, the view may read zeros.
        """
        info = ffi.new("kvx_import_info *")
        engine = self._mine()
        status = lib.kvx_import_viewed(engine, import_, 1)
        if status == Status.UNSUPPORTED:
            return None
        if status == 0:
            status = lib.kvx_import_query(engine, import_, info)
        if status != 0:
            raise error_for(status, what="mapping")
        if info.address == 0:
            return None
        exporter = self._import_views.find(import_)
        if exporter is None:
            exporter = ffi.buffer(ffi.cast("char *", info.address), info.length)
            self._import_views.add(import_, exporter, info.address, info.length)
        view = memoryview(exporter)
        return view if info.access & 2 else view.toreadonly()

    def release_import(self, import_: int) -> None:
        """Let go of an import; its running transfers still complete. One that is gone already is fine."""
        status = lib.kvx_import_release(self._mine(), import_)
        if status not in (0, Status.NO_IMPORT):
            raise error_for(status, what="release_import")
