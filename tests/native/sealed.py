"""A second implementation of sealed data connections, written from docs/wire-format.md: hostile on request.

Key schedule and records are in Python; X25519 and AES-256-GCM come from libcrypto through cffi, found as a tool would
find it. Nothing here knows the C code.
"""

from __future__ import annotations

import asyncio
import ctypes.util
import hashlib
import hmac
import os
import struct
from typing import Any

import cffi

from tests.native import kvxd
from tests.native.kvxd import ACCEPTOR, DIALLER, Refused, Speaker

VERSION = 2
SECRET = bytes(range(100, 132))
HELLO_BYTES, TEXT_MAX, TAG_BYTES = 96, 65536, 16
RECORDS_MAX = 1 << 20  # of one key
X25519, GET_TAG, SET_TAG = 1034, 0x10, 0x11

ffi = cffi.FFI()
ffi.cdef(
    """
    void *EVP_aes_256_gcm(void); void *EVP_CIPHER_CTX_new(void); void EVP_CIPHER_CTX_free(void *);
    int EVP_CIPHER_CTX_ctrl(void *, int, int, void *);
    int EVP_CipherInit_ex(void *, void *, void *, const char *, const char *, int);
    int EVP_CipherUpdate(void *, char *, int *, const char *, int);
    int EVP_CipherFinal_ex(void *, char *, int *);
    void *EVP_PKEY_new_raw_private_key(int, void *, const char *, size_t);
    void *EVP_PKEY_new_raw_public_key(int, void *, const char *, size_t);
    int EVP_PKEY_get_raw_public_key(void *, char *, size_t *); void EVP_PKEY_free(void *);
    void *EVP_PKEY_CTX_new(void *, void *); void EVP_PKEY_CTX_free(void *);
    int EVP_PKEY_derive_init(void *); int EVP_PKEY_derive_set_peer(void *, void *);
    int EVP_PKEY_derive(void *, char *, size_t *);
    """
)
lib: Any = ffi.dlopen(ctypes.util.find_library("crypto") or "libcrypto.so.3")


def hkdf(salt: bytes, material: bytes, *infos: tuple[str, int]) -> list[bytes]:
    """HKDF-SHA256: one result for each (info, length)."""
    root = hmac.digest(salt, material, hashlib.sha256)
    return [expand(root, info, length) for info, length in infos]


def expand(root: bytes, info: str, length: int) -> bytes:
    out = block = b""
    for number in range(1, -(-length // 32) + 1):
        block = hmac.digest(root, block + info.encode() + bytes([number]), hashlib.sha256)
        out += block
    return out[:length]


def public(private: bytes) -> bytes:
    key, out = lib.EVP_PKEY_new_raw_private_key(X25519, ffi.NULL, private, 32), ffi.new("char[32]")
    assert lib.EVP_PKEY_get_raw_public_key(key, out, ffi.new("size_t *", 32)) == 1
    lib.EVP_PKEY_free(key)
    return bytes(ffi.buffer(out))


def agree(private: bytes, theirs: bytes) -> bytes:
    mine = lib.EVP_PKEY_new_raw_private_key(X25519, ffi.NULL, private, 32)
    other = lib.EVP_PKEY_new_raw_public_key(X25519, ffi.NULL, theirs, 32)
    context, out = lib.EVP_PKEY_CTX_new(mine, ffi.NULL), ffi.new("char[32]")
    assert lib.EVP_PKEY_derive_init(context) == lib.EVP_PKEY_derive_set_peer(context, other) == 1
    assert lib.EVP_PKEY_derive(context, out, ffi.new("size_t *", 32)) == 1
    lib.EVP_PKEY_CTX_free(context)
    lib.EVP_PKEY_free(mine)
    lib.EVP_PKEY_free(other)
    return bytes(ffi.buffer(out))


def gcm(key: bytes, nonce: bytes, head: bytes, data: bytes, tag: bytes | None) -> bytes | None:
    """With a tag: the text, or None when it is wrong. Without: ciphertext and tag."""
    context, out, count = lib.EVP_CIPHER_CTX_new(), ffi.new("char[]", len(data) + 16), ffi.new("int *")
    try:
        assert lib.EVP_CipherInit_ex(context, lib.EVP_aes_256_gcm(), ffi.NULL, key, nonce, tag is None) == 1
        assert lib.EVP_CipherUpdate(context, ffi.NULL, count, head, len(head)) == 1
        assert lib.EVP_CipherUpdate(context, out, count, data, len(data)) == 1
        if tag is not None:
            lib.EVP_CIPHER_CTX_ctrl(context, SET_TAG, TAG_BYTES, ffi.from_buffer(tag))
            good = lib.EVP_CipherFinal_ex(context, ffi.new("char[16]"), count) == 1
            return bytes(ffi.buffer(out, len(data))) if good else None
        assert lib.EVP_CipherFinal_ex(context, ffi.new("char[16]"), count) == 1
        made = ffi.new("char[16]")
        assert lib.EVP_CIPHER_CTX_ctrl(context, GET_TAG, TAG_BYTES, made) == 1
        return bytes(ffi.buffer(out, len(data))) + bytes(ffi.buffer(made))
    finally:
        lib.EVP_CIPHER_CTX_free(context)


class Way:
    """One direction's keys, each for ``records_max`` records."""

    def __init__(self, chain: bytes, records_max: int = RECORDS_MAX) -> None:
        self.chain, self.records_max = chain, records_max
        self.keys = 0
        self.turn()

    def turn(self) -> None:
        self.key = expand(self.chain, "kvxfer sealed 2 key", 32)
        self.iv = expand(self.chain, "kvxfer sealed 2 iv", 12)
        self.chain = expand(self.chain, "kvxfer sealed 2 next", 32)
        self.keys += 1
        self.number = 0

    def nonce(self) -> bytes:
        if self.number == self.records_max:
            self.turn()
        number = int.from_bytes(self.iv, "big") ^ self.number
        self.number += 1
        return number.to_bytes(12, "big")

    def seal(self, text: bytes) -> bytes:
        head = struct.pack("<I", len(text))
        nonce = self.nonce()
        sealed = gcm(self.key, nonce, head, text, None)
        assert sealed is not None
        return head + sealed

    def open(self, head: bytes, sealed: bytes) -> bytes | None:
        nonce = self.nonce()
        return gcm(self.key, nonce, head, sealed[:-TAG_BYTES], sealed[-TAG_BYTES:])


class SealedReader:
    """As much of a stream reader as a `Speaker` uses."""

    def __init__(self, reader: asyncio.StreamReader, way: Way) -> None:
        self._reader, self._way, self._text = reader, way, b""

    async def record(self) -> bytes:
        head = await self._reader.readexactly(4)
        (length,) = struct.unpack("<I", head)
        text = self._way.open(head, await self._reader.readexactly(length + TAG_BYTES))
        assert text is not None, "the tag is wrong"
        return text

    async def readexactly(self, count: int) -> bytes:
        while len(self._text) < count:
            self._text += await self.record()
        found, self._text = self._text[:count], self._text[count:]
        return found

    async def read(self) -> bytes:
        return await self._reader.read()

    async def anything(self) -> bytes:
        """A byte, sealed or not; empty: the other side has closed."""
        try:
            return await self._reader.read(1)
        except OSError:  # uvloop: also ENOTCONN
            return b""


class SealedWriter:
    """The same of a stream writer. ``cut``: text bytes of each record."""

    def __init__(self, writer: asyncio.StreamWriter, way: Way) -> None:
        self.writer, self.way = writer, way
        self.cut = TEXT_MAX

    def write(self, data: bytes) -> None:
        for start in range(0, len(data), self.cut):
            self.writer.write(self.way.seal(data[start : start + self.cut]))

    def write_eof(self) -> None:
        self.writer.write_eof()

    def close(self) -> None:
        self.writer.close()


class SealedSpeaker(Speaker):
    """A `Speaker` whose frames travel in records; ``raw`` is the connection below them."""

    reader: Any
    writer: Any
    records_max = RECORDS_MAX

    async def greet_sealed(self, secret: bytes, *, theirs: bytes | None = None, confirm: bool = True) -> int:
        """Hellos and the two empty records; the acceptor's status. ``theirs``: a hello that was read already."""
        private = os.urandom(32)
        mine = kvxd.hello(self.role, self.nonce, version=VERSION) + public(private)
        raw = self.raw = self.writer
        raw.write(mine)
        if theirs is None:
            theirs = await self.exactly(HELLO_BYTES)
        assert theirs[:5] == b"KVXD\x02"
        dialler = self.role == DIALLER
        greeting = mine + theirs if dialler else theirs + mine
        material = secret + agree(private, theirs[64:])
        ours, other, self.nonces = hkdf(
            greeting,
            material,
            ("kvxfer sealed 2 dialler" if dialler else "kvxfer sealed 2 acceptor", 32),
            ("kvxfer sealed 2 acceptor" if dialler else "kvxfer sealed 2 dialler", 32),
            ("kvxfer sealed 2 binding", 32),
        )
        self.out, self.back = Way(ours, self.records_max), Way(other, self.records_max)
        if not dialler:
            raw.write(self.out.seal(b""))
        reader = SealedReader(self.reader, self.back)
        try:
            assert await asyncio.wait_for(reader.record(), 10) == b""
        except (asyncio.IncompleteReadError, OSError) as error:
            raise Refused from error
        if dialler and confirm:
            raw.write(self.out.seal(b""))
        self.reader, self.writer = reader, SealedWriter(raw, self.out)
        return int(kvxd.HELLO.unpack(theirs[:64])[6])


async def dial(endpoint: str) -> SealedSpeaker:
    speaker = await kvxd.dial(endpoint)
    return SealedSpeaker(speaker.reader, speaker.writer, DIALLER)


def acceptor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> SealedSpeaker:
    return SealedSpeaker(reader, writer, ACCEPTOR)
