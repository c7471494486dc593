"""A process with the engine of `build.py` in it, where bodies of tests are played, each in a child of its own.

    python -m tests.native.mutants.play SHIM MODULE...

``SHIM`` is what `build.built` returned. All modules are loaded once; then each line of the input is a body to play, and
each line of the output how it ended (`run.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from importlib import import_module
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

SHIM = "kvxfer.native._shim"


def load(path: str) -> None:
    """From now on this is the engine of the process."""
    loader = ExtensionFileLoader(SHIM, path)
    spec = spec_from_file_location(SHIM, path, loader=loader)
    assert spec is not None
    sys.modules[SHIM] = module_from_spec(spec)
    loader.exec_module(sys.modules[SHIM])


def play(module: str, body: str, arguments: list[str], environment: dict[str, str], said: str) -> int:
    """In the child: 1 when the body failed, which it tells in the file ``said``."""
    with open(said, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    try:
        asyncio.run(getattr(import_module(module), body)(*arguments))
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def serve(line: str) -> int:
    """How the child ended."""
    wanted: dict[str, Any] = json.loads(line)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = play(**wanted)
        finally:
            sys.stderr.flush()
            os._exit(status)  # whatever a broken engine left behind
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    load(sys.argv[1])
    for module in sys.argv[2:]:
        import_module(module)
    for line in sys.stdin:
        print(serve(line), flush=True)


if __name__ == "__main__":
    main()
