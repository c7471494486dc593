"""A second copy of the engine's module, with the deliberate bugs of `mutations.py` in it, asleep until one is named.

Only the files that a mutation changes are compiled: copies of them, without optimisation. The rest is what the build of
the product left behind, as long as it is up to date.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.native import sources
from tests.native.mutants.mutations import ALL, SEAL_RECORDS_MAX, Mutation
from tests.native.sources import NATIVE, headers, named

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent
BUILD = HERE.parent / "build" / "mutants"
PRODUCT = ROOT / "build" / f"temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
STANDARDS = {".c": "-std=gnu11", ".cc": "-std=c++17"}
FLAGS = ["-O0", "-g", "-fPIC", "-pthread", "-fvisibility=hidden", f"-I{NATIVE}", f"-I{HERE}"]
MUTANT = [
    *("-include", str(HERE / "mutant.h")),
    "-Wall",
    "-Wextra",
    "-Werror",
    f"-DKVX_SEAL_RECORDS_MAX={SEAL_RECORDS_MAX}",
]


class NotThere(Exception):
    """A mutation changes what does not stand in its file once."""


def changed(text: str, name: str, mutation: Mutation) -> str:
    """The text of a file with the bug in it."""
    for old, new in mutation.changes:
        if text.count(old) != 1:
            raise NotThere(f"{name}: {mutation.file} has {text.count(old)} times:\n{old}")
        text = text.replace(old, new.replace("MUTANT", f'kvx_mutant("{name}")'))
    return text


def mutated(file: str) -> str:
    """The text of a file with all its bugs."""
    text = named(file).read_text()
    for name, mutation in ALL.items():
        if mutation.file == file:
            text = changed(text, name, mutation)
    return f'#line 1 "{file}, mutated"\n{text}'


def compiler(suffix: str) -> str:
    variable, names = ("CXX", ("g++", "c++")) if suffix == ".cc" else ("CC", ("gcc", "cc"))
    found = os.environ.get(variable) or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise RuntimeError(f"no compiler for {suffix} files: install gcc and g++, or set CC and CXX")
    return found


def compiled(source: Path, target: Path, *flags: str) -> Path:
    include = sysconfig.get_path("include")
    made = target.with_suffix(".new")
    command = [compiler(source.suffix), STANDARDS[source.suffix], *FLAGS, f"-I{include}", *flags, "-c", str(source)]
    subprocess.run([*command, "-o", str(made)], check=True)
    made.rename(target)
    return target


def newer(target: Path, *sources: Path) -> bool:
    return target.exists() and all(target.stat().st_mtime > one.stat().st_mtime for one in sources)


def as_it_is(source: Path, around: list[Path]) -> Path:
    """The object of a file that no mutation changes."""
    for target in (PRODUCT / source.relative_to(ROOT).with_suffix(".o"), BUILD / f"{source.stem}.o"):
        if newer(target, source, *around):
            return target
    return compiled(source, target)


def with_bugs(file: str, around: list[Path]) -> Path:
    """The object of one that some do."""
    copy, target = BUILD / f"mutated_{file}", BUILD / f"mutated_{Path(file).stem}.o"
    text = mutated(file)
    if not copy.exists() or copy.read_text() != text:
        copy.write_text(text)
    return target if newer(target, copy, Path(__file__), *around) else compiled(copy, target, *MUTANT)


def built() -> Path:
    """The module, made again when anything is newer. One process at a time."""
    BUILD.mkdir(parents=True, exist_ok=True)
    everywhere = headers()
    ours = [*everywhere, *HERE.glob("*.h")]
    files = {mutation.file for mutation in ALL.values()}
    plain = [path for suffix in STANDARDS for path in sources.compiled(suffix) if path.name not in files]
    plain.append(ROOT / "build" / "shim" / "_shim.c")
    with (BUILD / "lock").open("w") as lock, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        jobs = [pool.submit(with_bugs, file, ours) for file in sorted(files)]
        jobs += [pool.submit(as_it_is, path, everywhere) for path in plain]
        jobs += [pool.submit(as_it_is, HERE / "mutant.c", ours)]
        objects = [job.result() for job in jobs]
        module = BUILD / "_shim.so"
        if not newer(module, *objects):
            made = module.with_suffix(".new")
            export = f"-Wl,--version-script={NATIVE / '_shim.map'}"
            command = [compiler(".cc"), "-shared", "-pthread", export, *map(str, objects), "-o", str(made)]
            subprocess.run(command, check=True)
            made.rename(module)
    return module
