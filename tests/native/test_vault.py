"""Memory for keys: left out of core dumps, zeros when given back, and used for everything that has a key in it."""

from __future__ import annotations

import ctypes
import re
import threading
from pathlib import Path
from random import Random

import pytest

from tests.native.alone import compiled
from tests.native.sources import NATIVE

PANIC = '#include "transport.h"\nvoid kvx_panic(const char *c, const char *f, int l) '
PANIC += "{ (void)c, (void)f, (void)l; __builtin_trap(); }\n"
SECRET = re.compile(r"\buint8_t (?:\w+, )*\w*(?:key|secret|chain)\w*\[|\bkey\[KVX_SEAL", re.IGNORECASE)


@pytest.fixture(scope="module")
def vault(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    loaded = compiled(tmp_path_factory.mktemp("vault"), "vault", PANIC)
    loaded.kvx_vault_take.restype = ctypes.c_void_p
    loaded.kvx_vault_take.argtypes = (ctypes.c_size_t,)
    loaded.kvx_vault_give.argtypes = (ctypes.c_void_p,)
    return loaded


def left_out(address: int, length: int) -> bool:
    """Does the kernel leave all these bytes out of a core dump?"""
    at, inside = address, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found is not None:
            begin, end = (int(one, 16) for one in found.groups())
            inside = begin <= at < end
        elif inside and line.startswith("VmFlags:"):
            if "dd" not in line.split()[1:]:
                return False
            at, inside = end, False
            if at >= address + length:
                return True
    return False


@pytest.mark.parametrize("size", [0, 1, 16, 96, 97, 1000, 32700, 32736, 32737, 100_000, 3 << 20])
def test_it_is_left_out_of_core_dumps(vault: ctypes.CDLL, size: int) -> None:
    address = vault.kvx_vault_take(size)
    assert address % 16 == 0
    assert left_out(address, max(size, 1))
    vault.kvx_vault_give(address)


def test_it_is_zeros_again_before_anybody_else_has_it(vault: ctypes.CDLL) -> None:
    rng, live = Random(5), {}
    for _ in range(20_000):
        if live and (rng.random() < 0.5 or len(live) > 500):
            address, (size, byte) = live.popitem()
            assert ctypes.string_at(address, size) == bytes([byte]) * size, "nobody else wrote there"
            vault.kvx_vault_give(address)
            continue
        size = rng.choice([rng.randrange(1, 300), rng.randrange(1, 40_000)])
        address = vault.kvx_vault_take(size)
        assert address not in live
        assert ctypes.string_at(address, size) == bytes(size)
        live[address] = size, rng.randrange(1, 256)
        ctypes.memset(address, live[address][1], size)
    for address in live:
        vault.kvx_vault_give(address)


def test_what_was_given_back_holds_nothing(vault: ctypes.CDLL) -> None:
    address = vault.kvx_vault_take(200)
    ctypes.memset(address, 0xAB, 200)
    vault.kvx_vault_give(address)
    assert b"\xab" not in ctypes.string_at(address, 200)
    vault.kvx_vault_give(None)
    assert vault.kvx_vault_take(2**64 - 1) is None


def test_from_any_thread(vault: ctypes.CDLL) -> None:
    wrong: list[int] = []

    def work(byte: int) -> None:
        for _ in range(3000):
            taken = [vault.kvx_vault_take(300) for _ in range(4)]
            for address in taken:
                ctypes.memset(address, byte, 300)
            for address in taken:
                if ctypes.string_at(address, 300) != bytes([byte]) * 300:
                    wrong.append(address)
                vault.kvx_vault_give(address)

    threads = [threading.Thread(target=work, args=(byte,)) for byte in range(1, 5)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong


def structures(text: str) -> dict[str, str]:
    plain = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    found = re.findall(r"^(?:typedef )?struct (\w+) \{\n(.*?)^\}", plain, re.DOTALL | re.MULTILINE)
    return dict(found)


def with_secrets() -> set[str]:
    """Structures that have a key in them, or a structure that has one."""
    known: dict[str, str] = {}
    for path in (*NATIVE.rglob("*.h"), *NATIVE.rglob("*.c")):
        known |= structures(path.read_text())
    found = {name for name, body in known.items() if SECRET.search(body)}
    while True:
        more = {
            name
            for name, body in known.items()
            if any(
                re.search(rf"^\s+(?:struct )?{inner} (?:\w+, )*\w+(?:\[[^\]]*\])?;", body, re.MULTILINE)
                for inner in found
            )
        }
        if more <= found:
            return found
        found |= more


def test_whatever_has_a_key_lies_there() -> None:
    secret = with_secrets()
    assert {"kvx_grant", "grant_box", "import_box", "peer_box", "tcp_conn", "tcp_request", "tcp_seal"} <= secret
    assert {"shm_attach", "shm_import", "hixl_attach", "hixl_import", "hixl_conn", "kvx_engine"} <= secret
    taken = re.compile(r"(\w+) \*?(?:\w|->)+ = (?:\w+ == NULL \? NULL : )?[cm]alloc\(")
    found = [(path.name, one[0], one[1]) for path in NATIVE.rglob("*.c") for one in taken.finditer(path.read_text())]
    assert len(found) > 20, "the pattern finds what there is"
    assert not [one for one in found if one[2] in secret]
