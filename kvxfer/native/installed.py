"""Which toolkit and driver for accelerators are installed, from files alone.

Nothing is loaded, so a daemon that does not use them can tell as well.

The toolkit is judged as it is after loading, by the names that its library has; what it says of itself comes along.
"""

from __future__ import annotations

import mmap
import os
import platform
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvxfer.native.transports import DIRECTORIES

LIBRARY = "libcann_hixl.so"
DRIVER = "/usr/local/Ascend/driver/version.info"
# The newest first; the last one has neither name.
MARKS = (("9.1+", b"_ZN4hixl4Hixl12ConnectAsyncE"), ("9.0", b"HixlCSServerCreate"))
OLDEST = "8.5"
VERSION = re.compile(r"^\s*version\s*=\s*\[?([\w.:+-]{1,64})", re.IGNORECASE | re.MULTILINE)
SAYS = ("ascend_toolkit_install.info", "version.info", "version.cfg")
TEXT_BYTES_MAX = 64 << 10
DYNAMIC_SYMBOLS = 11  # a section's type


def installed(root: Path = Path("/"), env: Mapping[str, str] | None = None) -> dict[str, object]:
    """``toolkit``, ``reported`` and ``driver``, as far as there are any; empty: no toolkit."""
    known = os.environ if env is None else env
    for name in _directories(known):
        directory = root / name.lstrip("/")
        toolkit = _judged(directory / LIBRARY)
        if toolkit:
            found = {"toolkit": toolkit, "reported": _reported(directory), "driver": _version(root / DRIVER[1:])}
            return {what: value for what, value in found.items() if value}
    return {}


def _directories(env: Mapping[str, str]) -> Iterator[str]:
    """In the order in which the engine looks."""
    home = env.get("ASCEND_HOME_PATH", "")
    named = env.get("KVXFER_CANN_LIBDIR", "")
    if named:
        yield named
    if home:
        yield from (f"{home}/lib64", f"{home}/{platform.machine()}-linux/lib64")
    yield from DIRECTORIES


def _judged(library: Path) -> str:
    try:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            begin, end = _names(content)
            return next((toolkit for toolkit, mark in MARKS if content.find(b"\0" + mark, begin, end) >= 0), OLDEST)
    except (OSError, ValueError, struct.error):  # not there, empty, or no library
        return ""


def _names(library: mmap.mmap) -> tuple[int, int]:
    """Where the names of what it exports begin and end: of a 64-bit ELF file, in the byte order of this machine."""
    if library[:5] != b"\x7fELF\x02":
        raise ValueError("not a library of this machine")
    (table,) = struct.unpack_from("=Q", library, 40)
    size, count = struct.unpack_from("=HH", library, 58)
    sections = [struct.unpack_from("=IIQQQQII", library, table + number * size) for number in range(count)]
    symbols = next((section for section in sections if section[1] == DYNAMIC_SYMBOLS), None)
    if symbols is None or symbols[6] >= count:
        raise ValueError("it exports nothing")
    texts = sections[symbols[6]]
    return texts[4], texts[4] + texts[5]


def _reported(directory: Path) -> str:
    """What the files around the libraries say: the directory above, or that of this machine in it."""
    above = directory.parent
    places = (above, above / f"{platform.machine()}-linux", above.parent)
    return next((found for place in places for name in SAYS if (found := _version(place / name))), "")


def _version(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            match = VERSION.search(file.read(TEXT_BYTES_MAX))
    except OSError:
        return ""
    return match[1] if match else ""
