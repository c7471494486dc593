"""Generates `_shim.c`, the bridge between Python and the native engine, from the `*.cdef.h` and `api.csrc.c`.

Every build does it (`setup.py`), so there is no generated file in the tree that could be stale.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
DECLARATIONS = ("api.cdef.h", "ascend.cdef.h")


def generate() -> bytes:
    """The text of `_shim.c`."""
    from cffi import FFI
    from cffi.recompiler import make_c_source

    ffi = FFI()
    for name in DECLARATIONS:
        ffi.cdef((HERE / name).read_text())
    with TemporaryDirectory() as directory:
        target = Path(directory) / "_shim.c"
        make_c_source(ffi, "kvxfer.native._shim", (HERE / "api.csrc.c").read_text(), str(target))
        return target.read_bytes()


def write(target: Path) -> None:
    """Write it there, unless it is there already: what did not change is not compiled again."""
    fresh = generate()
    if not target.exists() or target.read_bytes() != fresh:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(fresh)
