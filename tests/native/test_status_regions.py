"""The words for what went wrong with memory: `kvxfer/native/status.py`, as far as no engine is needed for it."""

from __future__ import annotations

from kvxfer.native._shim import ffi
from kvxfer.native.status import StatusCode, memory_error


def told(text: str) -> str:
    why = ffi.new("kvx_mem_why *")
    room = len(why.text)
    why.text = text.encode()[: room - 1].ljust(room, b"\0")
    return memory_error(ffi, StatusCode.UNSUPPORTED, why, "alloc", device=0).message


def test_what_fits_is_told_as_it_is() -> None:
    assert told("One. Two") == "alloc: this machine or transport cannot do it: One. Two"


def test_what_was_cut_ends_with_a_whole_sentence() -> None:
    room = len(ffi.new("kvx_mem_why *").text)
    assert told("One. " + "x" * room).endswith(": One. ...")
    assert told("x" * room).endswith("x ...")
    assert told("x" * (room - 1)).endswith("x ..."), "nobody can tell whether there was more"
