"""A worker process that is driven from outside: one JSON object per line in, one per line out.

``{"do": name, ...}`` calls the coroutine method ``name`` of the handler and is answered by ``{"ok": true, ...}`` or,
for a kvxfer error, ``{"ok": false, "error": code, "message": text}``. Any other error ends the process: it is a bug.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from examples.child_processes import Process
from kvxfer.errors import KvxferError


class WorkerFailed(Exception):
    """A command failed; ``code`` is the kvxfer error's code."""

    def __init__(self, who: str, what: str, answer: dict[str, Any]) -> None:
        self.code = str(answer["error"])
        super().__init__(f"{who}: {what}: {self.code}: {answer['message']}")


class Remote:
    """The other end of `serve`: a worker process as an object with one method."""

    def __init__(self, process: Process, timeout: float) -> None:
        self.process = process
        self._timeout = timeout
        self._turn = asyncio.Lock()
        self._owed = 0  # answers

    async def do(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        """Run one command; raises `WorkerFailed` with the worker's own words when it failed."""
        async with self._turn:
            self.process.write(json.dumps({"do": name, **arguments}) + "\n")
            self._owed += 1
            while self._owed:  # also those of earlier commands that came too late
                line = await self.process.readline(self._timeout)
                self._owed -= 1
            answer: dict[str, Any] = json.loads(line)
        if not answer.pop("ok"):
            raise WorkerFailed(self.process.name, name, answer)
        return answer


async def serve(handler: object) -> None:
    """Answer commands until stdin ends."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        method = getattr(handler, command.pop("do"))
        try:
            answer = {"ok": True, **(await method(**command) or {})}
        except KvxferError as error:
            answer = {"ok": False, "error": error.code, "message": str(error)}
        print(json.dumps(answer), flush=True)
