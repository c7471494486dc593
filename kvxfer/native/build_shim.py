"""Generates `_shim.c`, the bridge between Python and the native engine, from the `*.cdef.h` and `api.csrc.c`.

The generated file is committed, so building a wheel needs a C compiler and nothing else; a test compares it
with a fresh one. Run ``python -m kvxfer.native.build_shim`` after a change of a `*.cdef.h`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
SHIM = HERE / "_shim.c"
DECLARATIONS = ("api.cdef.h", "ascend.cdef.h")


def generate() -> bytes:
    """The text of `_shim.c`."""
    from cffi import FFI

    ffi = FFI()
    for name in DECLARATIONS:
        ffi.cdef((HERE / name).read_text())
    ffi.set_source("kvxfer.native._shim", (HERE / "api.csrc.c").read_text())
    with TemporaryDirectory() as directory:
        target = Path(directory) / "_shim.c"
        ffi.emit_c_code(str(target))
        return target.read_bytes()


def main() -> int:
    """Write `_shim.c`; exit code 1 when it changed, so that a check can use it."""
    fresh = generate()
    changed = not SHIM.exists() or SHIM.read_bytes() != fresh
    if changed:
        SHIM.write_bytes(fresh)
    print(f"{SHIM.name}: {'written' if changed else 'unchanged'}")
    return int(changed)


if __name__ == "__main__":
    sys.exit(main())
