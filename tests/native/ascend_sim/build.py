"""Compiles the simulated CANN libraries: a directory per toolkit version, string ABI, compiler and text of sources.

``build("9.1", abi=1)`` gives the directory that ``KVXFER_CANN_LIBDIR`` is to name; a second call finds it made. Several
processes may ask at once: one builds under a file lock into a directory that is then renamed. ``CXX`` chooses the
compiler (also a cross compiler: its name and version are part of the directory's).

    python -m tests.native.ascend_sim.build --variant 8.5 --abi 0      prints the directory
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
BUILT = HERE.parent / "build" / "ascend_sim"
VARIANTS = ("8.5", "9.0", "9.1")
FLAGS = (
    "-std=c++17 -O2 -g -fPIC -pthread -fvisibility=hidden -fno-strict-aliasing "
    "-Wall -Wextra -Werror -Wshadow -Wconversion -Wno-unused-parameter"
)


class NoCompilerError(RuntimeError):
    """There is no C++ compiler here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A library to build: its soname, its sources, what it needs, what it may export (a linker's pattern)."""

    name: str
    sources: tuple[str, ...]
    exports: str
    needs: tuple[str, ...] = ()


LIBRARIES = (
    Library(
        name="libacl_rt.so",
        sources=("settings.cc", "state.cc", "memory.cc", "acl_device.cc", "acl_memory.cc", "acl_stream.cc"),
        exports="acl*; kvxsim_*;",
    ),
    Library(name="libmetadef.so", sources=("metadef.cc",), exports="_ZN2ge12AscendStringC1*; _ZNK2ge12AscendString*;"),
    Library(name="libhcomm.so", sources=("empty.cc",), exports="kvxsim_placeholder;"),
    Library(name="liberror_manager.so", sources=("empty.cc",), exports="kvxsim_placeholder;"),
    Library(
        name="libcann_hixl.so",
        sources=("hixl.cc", "engine.cc", "server.cc", "transfer.cc", "wire.cc"),
        exports="_ZN4hixl4HixlC1Ev; _ZN4hixl4HixlD1Ev; _ZN4hixl4Hixl[0-9]*;",
        needs=("libacl_rt.so", "libmetadef.so", "libhcomm.so", "liberror_manager.so"),
    ),
)


def sources() -> list[Path]:
    """What decides whether something is built again."""
    return sorted(path for path in HERE.iterdir() if path.suffix in (".cc", ".h") or path.name == "build.py")


@cache
def compiler() -> tuple[str, str]:
    """The compiler and what it says of itself. Raises NoCompilerError with what to install."""
    named = os.environ.get("CXX", "")
    for candidate in [named] if named else ["g++", "clang++"]:
        if shutil.which(candidate):
            said = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=True)
            machine = subprocess.run([candidate, "-dumpmachine"], capture_output=True, text=True, check=True)
            return candidate, said.stdout.splitlines()[0] + " " + machine.stdout.strip()
    raise NoCompilerError(
        f"no C++ compiler ({named or 'g++ or clang++'}): the simulated CANN libraries cannot be built. "
        "Install one (Debian, Ubuntu: apt-get install g++) or name one in CXX."
    )


def flags(variant: str, abi: int, sanitize: str | None) -> list[str]:
    major, minor = variant.split(".")
    out = [*FLAGS.split(), f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-DKVXSIM_VERSION_MAJOR={major}"]
    out.append(f"-DKVXSIM_VERSION_MINOR={minor}")
    if variant == "9.1":
        out += ["-DKVXSIM_HAS_ASYNC_CONNECT=1", "-DKVXSIM_HAS_ADDRESS_RANGE=1"]
    if sanitize:
        out.append(f"-fsanitize={sanitize}")
    return out


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def compile_into(directory: Path, options: list[str]) -> None:
    cxx, _ = compiler()
    for library in LIBRARIES:
        script = directory / f"{library.name}.map"
        script.write_text(f"{{ global: {library.exports} local: *; }};\n")
        command = [cxx, *options, "-shared", *(str(HERE / name) for name in library.sources)]
        command += [
            "-o",
            str(directory / library.name),
            f"-Wl,-soname,{library.name}",
            f"-Wl,--version-script,{script}",
        ]
        command += [
            f"-L{directory}",
            "-Wl,-rpath,$ORIGIN",
            "-Wl,--no-as-needed,-z,defs",
            *(f"-l:{name}" for name in library.needs),
        ]
        run(command)
        script.unlink()
    (directory / "libascendcl.so").symlink_to("libacl_rt.so")


def made(family: Path, options: list[str], work: Callable[[Path], None], *also: object) -> Path:
    """The directory in `family` for these options and sources; `work` fills it when it is not there."""
    digest = hashlib.sha256(repr((options, compiler(), also)).encode())
    for path in sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    target = family / digest.hexdigest()[:16]
    if target.is_dir():
        return target
    family.mkdir(parents=True, exist_ok=True)
    with (family / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        fresh = Path(tempfile.mkdtemp(dir=family, prefix=".work-"))
        try:
            work(fresh)
            fresh.rename(target)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return target


def build(variant: str = "9.1", abi: int = 1, sanitize: str | None = None) -> Path:
    """The directory with the libraries, built if need be. ``sanitize``: what -fsanitize= takes."""
    if variant not in VARIANTS or abi not in (0, 1):
        raise ValueError(f"variant {variant!r} is not one of {VARIANTS}, or abi {abi!r} not 0 or 1")
    options = flags(variant, abi, sanitize)
    family = BUILT / f"{variant}-abi{abi}{'-' + sanitize.replace(',', '-') if sanitize else ''}"
    return made(family, options, lambda work: compile_into(work, options))


def build_driver(variant: str, abi: int, libraries: Path, sanitize: str | None = None) -> Path:
    """The test's program, linked to the libraries; its string ABI may differ from theirs."""
    options = flags(variant, abi, sanitize)
    names = [f"-l:{library.name}" for library in LIBRARIES]

    def work(directory: Path) -> None:
        command = [compiler()[0], *options, str(HERE / "driver.cc"), "-o", str(directory / "driver")]
        run([*command, f"-L{libraries}", *names, f"-Wl,-rpath,{libraries}"])

    return made(BUILT / f"driver-{variant}-abi{abi}", options, work, libraries) / "driver"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=VARIANTS, default="9.1")
    parser.add_argument("--abi", type=int, choices=(0, 1), default=1)
    parser.add_argument("--sanitize", help="what -fsanitize= takes, for example address or thread")
    arguments = parser.parse_args()
    print(build(arguments.variant, arguments.abi, arguments.sanitize))


if __name__ == "__main__":
    main()
