"""A router for one prefill and one decode engine of vLLM: a prompt goes to prefill first, then with what it answered
to decode, whose answer goes to the client. For trying things out; vLLM's own example proxies do the same.

    python examples/vllm_proxy.py --port 8000 --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

It needs aiohttp, which vLLM brings along. `GET /ready` answers 200 when both engines do.
"""

from __future__ import annotations

import argparse
import uuid
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web

ANSWER_S = 600.0
# "Somebody else will decode this": what vLLM's proxies send to the prefill engine.
FOR_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Router:
    """Two engines, and the requests between them."""

    def __init__(self, prefill: str, decode: str) -> None:
        self.prefill = prefill.rstrip("/")
        self.decode = decode.rstrip("/")
        self.session: ClientSession | None = None

    async def open(self, app: web.Application) -> None:
        self.session = ClientSession(timeout=ClientTimeout(total=ANSWER_S))

    async def close(self, app: web.Application) -> None:
        if self.session is not None:
            await self.session.close()

    async def ready(self, request: web.Request) -> web.Response:
        assert self.session is not None
        for engine in (self.prefill, self.decode):
            try:
                async with self.session.get(f"{engine}/health") as answer:
                    if answer.status != 200:
                        return web.Response(status=503, text=f"{engine} says {answer.status}\n")
            except ClientError as error:
                return web.Response(status=503, text=f"{engine}: {error}\n")
        return web.Response(text="ready\n")

    async def complete(self, request: web.Request) -> web.StreamResponse:
        assert self.session is not None
        asked: dict[str, Any] = await request.json()
        headers = {"X-Request-Id": str(uuid.uuid4())}
        first = {**asked, "max_tokens": 1, "stream": False, "kv_transfer_params": FOR_PREFILL}
        first.pop("stream_options", None)
        if "max_completion_tokens" in first:
            first["max_completion_tokens"] = 1
        async with self.session.post(self.prefill + request.path, json=first, headers=headers) as answer:
            if answer.status != 200:
                return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)
            params = (await answer.json()).get("kv_transfer_params")
        second = {**asked, "kv_transfer_params": params} if params else asked
        async with self.session.post(self.decode + request.path, json=second, headers=headers) as answer:
            told = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await told.prepare(request)
            async for chunk in answer.content.iter_any():
                await told.write(chunk)
            await told.write_eof()
            return told


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--decode", required=True)
    given = parser.parse_args()
    router, app = Router(given.prefill, given.decode), web.Application()
    app.on_startup.append(router.open)
    app.on_cleanup.append(router.close)
    app.router.add_get("/ready", router.ready)
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.router.add_post(path, router.complete)
    web.run_app(app, host=given.host, port=given.port, print=None)


if __name__ == "__main__":
    main()
