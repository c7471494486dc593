"""SipHash-2-4 with 128 bits of output, against the published reference vectors (key 00..0f, message 00, 01, ...)."""

from __future__ import annotations

import pytest

from kvxfer.native._shim import ffi, lib

KEY = bytes(range(16))
VECTORS = {
    0: "a3817f04ba25a8e66df67214c7550293",
    1: "da87c1d86b99af44347659119b22fc45",
    2: "8177228da4a45dc7fca38bdef60affe4",
    3: "9c70b60c5267a94e5f33b6b02985ed51",
    4: "f88164c12d9c8faf7d0f6e7c7bcd5579",
    5: "1368875980776f8854527a07690e9627",
    6: "14eeca338b208613485ea0308fd7a15e",
    7: "a1f1ebbed8dbc153c0b84aa61ff08239",
    8: "3b62a9ba6258f5610f83e264f31497b4",
    15: "5493e99933b0a8117e08ec0f97cfc3d9",
    63: "5150d1772f50834a503e069a973fbd7c",
}


def mac(key: bytes, message: bytes) -> bytes:
    out = ffi.new("uint8_t[16]")
    lib.kvx_mac(key, message, len(message), out)
    return bytes(out)


@pytest.mark.parametrize("length", VECTORS)
def test_reference_vectors(length: int) -> None:
    assert mac(KEY, bytes(range(length))).hex() == VECTORS[length]


def test_every_bit_of_key_and_message_counts() -> None:
    message = bytes(range(40))
    seen = {mac(KEY, message)}
    for bit in range(128):
        seen.add(mac((int.from_bytes(KEY, "big") ^ (1 << bit)).to_bytes(16, "big"), message))
    for bit in range(len(message) * 8):
        seen.add(mac(KEY, (int.from_bytes(message, "big") ^ (1 << bit)).to_bytes(40, "big")))
    assert len(seen) == 1 + 128 + 320
