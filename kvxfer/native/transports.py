"""The option `transports` as the engine wants it: what "auto" stands for on this machine.

"auto" is every transport that there is, the best first. One that needs libraries of an accelerator is asked for as "may
be missing", and only where something points to such libraries: elsewhere nothing is even looked for. Named beside
"auto" it may be missing too; named without it, its absence is an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

AUTO = "auto"
EVERY = ("hixl", "shm", "tcp")
OF_ACCELERATORS = frozenset({"hixl"})
# What `ascend_load.c` looks at, apart from libraries that are in the process or on the loader's path already.
VARIABLES = ("KVXFER_CANN_LIBDIR", "ASCEND_HOME_PATH")
DIRECTORIES = ("/usr/local/Ascend/cann/lib64", "/usr/local/Ascend/ascend-toolkit/latest/lib64")


def accelerators_likely(env: Mapping[str, str] | None = None, directories: Sequence[str] = DIRECTORIES) -> bool:
    """Something says that this machine has libraries for accelerators; they are not opened to find out."""
    known = os.environ if env is None else env
    return any(known.get(name) for name in VARIABLES) or any(Path(name).is_dir() for name in directories)


def expanded(transports: Sequence[str], *, accelerators: bool) -> tuple[str, ...]:
    """The list without "auto": names for the engine, those that may be missing with a "?" before them."""
    if AUTO not in transports:
        return tuple(transports)
    given = {name.removeprefix("fault+"): name for name in transports if name != AUTO}
    rest = [name for name in EVERY if name not in given and (accelerators or name not in OF_ACCELERATORS)]
    names = [name for one in transports for name in (rest if one == AUTO else [one])]
    return tuple(f"?{name}" if name in OF_ACCELERATORS else name for name in names)


def names_of(transports: Sequence[str]) -> tuple[str, ...]:
    """For people: which transports a configured list stands for here."""
    return tuple(name.removeprefix("?") for name in expanded(transports, accelerators=accelerators_likely()))
