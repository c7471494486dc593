"""The scrape server: what it answers, and that hostile input closes the connection quietly."""

from __future__ import annotations

import asyncio
import socket

import pytest

from kvxfer.daemon.http import CONNECTIONS_MAX, REQUEST_BYTES_MAX, HttpServer, Response, encode_response


def make_server(**options: float) -> HttpServer:
    def broken() -> Response:
        raise RuntimeError("collector broke")

    routes = {
        "/healthz": lambda: Response(body=b"ok\n"),
        "/readyz": lambda: Response(status=503, body=b"draining\n"),
        "/broken": broken,
    }
    return HttpServer(routes, **options)  # type: ignore[arg-type]


async def talk(port: int, request: bytes, *, eof: bool = False) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        if eof:
            writer.write_eof()
        async with asyncio.timeout(5):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


@pytest.fixture
async def server():
    made = make_server(connection_s=2.0)
    await made.start(socket.create_server(("127.0.0.1", 0)))
    yield made
    await made.aclose()


@pytest.mark.parametrize(
    ("request_line", "status", "body"),
    [
        (b"GET /healthz HTTP/1.1", b"200 OK", b"ok\n"),
        (b"GET /healthz?verbose=1 HTTP/1.0", b"200 OK", b"ok\n"),
        (b"GET /readyz HTTP/1.1", b"503 Service Unavailable", b"draining\n"),
        (b"GET /secret HTTP/1.1", b"404 Not Found", b"try /broken /healthz /readyz\n"),
        (b"POST /healthz HTTP/1.1", b"405 Method Not Allowed", b"only GET and HEAD\n"),
        (b"GET /broken HTTP/1.1", b"500 Internal Server Error", b"internal error\n"),
    ],
)
async def test_answers(server: HttpServer, request_line: bytes, status: bytes, body: bytes) -> None:
    answer = await talk(server.port, request_line + b"\r\nHost: here\r\n\r\n")
    head, _, got = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status)
    assert got == body
    assert f"Content-Length: {len(body)}".encode() in head


async def test_head_has_the_length_and_no_body(server: HttpServer) -> None:
    answer = await talk(server.port, b"HEAD /healthz HTTP/1.1\r\n\r\n")
    assert b"Content-Length: 3" in answer
    assert answer.endswith(b"\r\n\r\n")


async def test_request_byte_by_byte(server: HttpServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for byte in b"GET /healthz HTTP/1.1\r\nHost: here\r\n\r\n":
        writer.write(bytes([byte]))
        await asyncio.sleep(0)
    async with asyncio.timeout(5):
        assert (await reader.read()).endswith(b"ok\n")
    writer.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        bytes(range(256)),
        b"get /healthz http/1.1\r\n\r\n",
        b"GET  /healthz HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/9.9\r\n\r\n",
        b"GET http://other/ HTTP/1.1\r\n\r\n",
        b"\r\n\r\n",
        b"GET /" + b"a" * 2000 + b" HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n" + b"X: y\r\n" * (REQUEST_BYTES_MAX // 6 + 1),
    ],
)
async def test_hostile_input_is_closed_without_an_answer(server: HttpServer, garbage: bytes) -> None:
    assert await talk(server.port, garbage) == b""
    assert (await talk(server.port, b"GET /healthz HTTP/1.1\r\n\r\n")).endswith(b"ok\n")


async def test_request_at_the_limit_is_answered(server: HttpServer) -> None:
    head = b"GET /healthz HTTP/1.1\r\nX: "
    answer = await talk(server.port, head + b"y" * (REQUEST_BYTES_MAX - len(head)) + b"\r\n\r\n")
    assert answer.endswith(b"ok\n")


async def test_silent_connection_is_dropped_at_its_deadline() -> None:
    server = make_server(connection_s=0.1)
    await server.start(socket.create_server(("127.0.0.1", 0)))
    try:
        assert await talk(server.port, b"GET /heal") == b""
        assert await talk(server.port, b"GET /heal", eof=True) == b""
    finally:
        await server.aclose()


async def test_connections_are_bounded_and_a_probe_gets_through() -> None:
    server = make_server(connection_s=5.0)
    await server.start(socket.create_server(("127.0.0.1", 0)))
    held = []
    try:
        for _ in range(CONNECTIONS_MAX):
            held.append(await asyncio.open_connection("127.0.0.1", server.port))
            held[-1][1].write(b"GET ")
        assert (await talk(server.port, b"GET /healthz HTTP/1.1\r\n\r\n")).endswith(b"ok\n")
        assert server.refused == 1
        assert await held[0][0].read() == b""  # the oldest made room
    finally:
        for _, writer in held:
            writer.close()
        await server.aclose()


def test_encoding_is_plain() -> None:
    encoded = encode_response(Response(body=b"x"), head_only=False)
    assert encoded.count(b"\r\n\r\n") == 1
    assert encoded.endswith(b"\r\n\r\nx")
