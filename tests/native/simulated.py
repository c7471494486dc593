"""Tests over the simulated CANN libraries: each one is a process of its own, since libraries load once in each.

``@simulated()`` turns a function, or a coroutine function, into a test that runs it in a child and looks at the
simulator's log: whatever it calls a FAULT (use after free, out of range) fails the test.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.native.ascend_sim.build import build

ROOT = Path(__file__).resolve().parents[2]
SLACK = float(os.environ.get("KVXFER_TEST_SLACK", "1"))
BODIES: dict[tuple[str, str], Callable[[], Any]] = {}


def environment(directory: Path, variant: str = "9.1", **settings: object) -> dict[str, str]:
    """What a process needs to see simulated cards; ``settings`` are KVXFER_SIM_* without the prefix."""
    taken = re.compile(r"KVXFER_(?!TEST_)|ASCEND_")
    kept = {name: value for name, value in os.environ.items() if not taken.match(name)}
    kept |= {"KVXFER_CANN_LIBDIR": str(build(variant)), "KVXFER_SIM_DIR": str(directory)}
    kept |= {f"KVXFER_SIM_{name}": str(value) for name, value in settings.items()}
    return kept | {"PYTHONPATH": str(ROOT)}


def faults(directory: Path) -> list[str]:
    """What the simulator caught."""
    log = directory / "sim.log"
    return [line for line in log.read_text().splitlines() if "FAULT" in line] if log.exists() else []


def run(module: str, name: str, directory: Path, **settings: Any) -> None:
    """Run a body in a child; its output is the failure's text."""
    command = [sys.executable, "-m", "tests.native.simulated", module, name]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(directory, **settings),
        capture_output=True,
        text=True,
        timeout=60 * SLACK,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    caught = faults(directory)
    assert not caught, "\n".join(caught)


def simulated(**settings: Any) -> Callable[[Callable[[], Any]], Callable[[Path], None]]:
    """See above; ``variant`` is the toolkit's version, all else are settings of the simulator."""

    def decorate(body: Callable[[], Any]) -> Callable[[Path], None]:
        BODIES[body.__module__, body.__name__] = body

        @functools.wraps(body)
        def test(tmp_path: Path) -> None:
            run(body.__module__, body.__name__, tmp_path, **settings)

        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # pytest looks for fixtures here
            [inspect.Parameter("tmp_path", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        )
        return test

    return decorate


def main() -> None:
    """In the child."""
    _, module, name = sys.argv
    from tests.native import simulated as shared  # this file as a module: it runs as __main__ here

    importlib.import_module(module)
    result = shared.BODIES[module, name]()
    if inspect.iscoroutine(result):
        asyncio.run(result)


if __name__ == "__main__":
    main()
