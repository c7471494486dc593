"""A client with a daemon of its own in the same process: for demonstrations, notebooks and tests, without any set-up.

It stands apart from `client.py`, so that the client library does not import the daemon.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvxfer.client import Client
from kvxfer.server import Server, embedded_config


@asynccontextmanager
async def local(**options: Any) -> AsyncIterator[Client]:
    """``async with kvxfer.local() as client``: a client with its daemon in this process; no set-up, loopback only.

    ``options`` are configuration values, over the defaults of `Config.embedded`. Raises: `ConfigError` for a wrong one,
    and what opening a `Server` and a `Client` raises.
    """
    config = embedded_config(**options)
    async with Server(config, embedded=True) as server, Client(server.socket_path, config=config) as client:
        yield client
