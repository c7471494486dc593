"""As much of an ELF file as says how it is protected: no tool of the host is needed."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

PT_LOAD, PT_DYNAMIC, PT_GNU_STACK, PT_GNU_RELRO = 1, 2, 0x6474E551, 0x6474E552
PF_X, PF_W = 1, 2
DT_STRTAB, DT_STRSZ, DT_TEXTREL, DT_BIND_NOW, DT_FLAGS, DT_FLAGS_1 = 5, 10, 22, 24, 30, 0x6FFFFFFB
DF_TEXTREL, DF_BIND_NOW, DF_1_NOW = 4, 8, 1
HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SEGMENT = struct.Struct("<IIQQQQQQ")


@dataclass(frozen=True, slots=True)
class Elf:
    """Segments as (type, flags), the dynamic section, and the names of all that is bound at load time."""

    segments: tuple[tuple[int, int], ...]
    dynamic: dict[int, int]
    names: frozenset[str]

    @property
    def binds_now(self) -> bool:
        """Nothing is looked up later, so that all tables are read-only by then."""
        flags, flags_1 = self.dynamic.get(DT_FLAGS, 0), self.dynamic.get(DT_FLAGS_1, 0)
        return bool(DT_BIND_NOW in self.dynamic or flags & DF_BIND_NOW or flags_1 & DF_1_NOW)

    @property
    def rewrites_code(self) -> bool:
        return bool(DT_TEXTREL in self.dynamic or self.dynamic.get(DT_FLAGS, 0) & DF_TEXTREL)


def read(path: Path) -> Elf:
    """A 64-bit little-endian shared library."""
    data = path.read_bytes()
    ident, *_, entries_at, _, _, _, size, count, _, _, _ = HEADER.unpack_from(data)
    assert ident[:6] == b"\x7fELF\x02\x01", "64 bits, little-endian"
    rows = [SEGMENT.unpack_from(data, entries_at + size * index) for index in range(count)]
    [(at, length)] = [(row[2], row[5]) for row in rows if row[0] == PT_DYNAMIC]
    dynamic = dict(struct.iter_unpack("<QQ", data[at : at + length]))
    place = dynamic[DT_STRTAB]
    [offset] = [row[2] + place - row[3] for row in rows if row[0] == PT_LOAD and row[3] <= place < row[3] + row[6]]
    names = data[offset : offset + dynamic[DT_STRSZ]].split(b"\0")
    return Elf(tuple(row[:2] for row in rows), dynamic, frozenset(name.decode() for name in names))
