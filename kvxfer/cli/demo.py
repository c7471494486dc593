"""`kvxfer demo`: the demonstration of `examples/demo.py`, from a checkout or from an installed package."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from types import ModuleType

import kvxfer
from kvxfer.errors import UsageError

NAME = "kvxfer_demo"
INSTALLED = "share/kvxfer/examples/demo.py"


def script() -> Path | None:
    """Where the demonstration lies: beside the package in a checkout, else among the files that were installed."""
    beside = Path(kvxfer.__file__).parent.parent / "examples" / "demo.py"
    if beside.is_file():
        return beside
    try:
        files = Distribution.from_name("kvxfer").files or []
    except PackageNotFoundError:
        return None
    found = (Path(str(file.locate())) for file in files if file.as_posix().endswith(INSTALLED))
    return next((path.resolve() for path in found if path.is_file()), None)


def demonstration() -> ModuleType | None:
    """The script as a module, imported once."""
    path = script()
    if path is None:
        return None
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(NAME, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[NAME]


def configure(parser: argparse.ArgumentParser) -> None:
    """The script's own arguments."""
    module = demonstration()
    if module is not None:
        module.configure(parser)


def run(args: argparse.Namespace) -> int:
    """Hand over to the script; its exit status is ours."""
    module = demonstration()
    if module is None:
        hint = "run it from a checkout: make demo"
        raise UsageError("the demonstration is not installed with this copy of kvxfer", hint=hint)
    return int(module.run(args))
