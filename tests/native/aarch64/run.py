"""Builds all native code for aarch64 with a cross compiler, warnings as errors, and runs the C tests in an emulator.

    python -m tests.native.aarch64.run [--only roundtrip]

Most hosts of Ascend cards are aarch64, most development machines are not. What an emulator on x86 cannot show: races
that need the weaker memory order of a real CPU (it keeps the stronger one of the host), cross-memory attach (qemu has
no such call, so `shm` moves memory that it allocated), and speed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvxfer.native import build_shim
from tests.native.sanitize import run as sanitize
from tests.native.sources import NATIVE, compiled, headers, named

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent
TESTS = ROOT / "tests" / "native"
BUILD = TESTS / "build" / "aarch64"

TRIPLE = "aarch64-linux-gnu"
SYSROOT = f"/usr/{TRIPLE}"
CC = os.environ.get("CROSS_CC", f"{TRIPLE}-gcc")
CXX = os.environ.get("CROSS_CXX", f"{TRIPLE}-g++")
OBJDUMP = f"{TRIPLE}-objdump"
EMULATOR = os.environ.get("CROSS_RUN", f"qemu-aarch64 -L {SYSROOT}")
PACKAGES = {
    CC: "gcc-aarch64-linux-gnu",
    CXX: "g++-aarch64-linux-gnu",
    OBJDUMP: "binutils-aarch64-linux-gnu",
    EMULATOR.split()[0]: "qemu-user",
    f"{SYSROOT}/lib/libc.so.6": "libc6-dev-arm64-cross",
}

WARNINGS = ["-Wall", "-Wextra", "-Werror"]
STRICT = ["-Wshadow"]
HARDENED = ["-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"]  # as setup.py
OPTIMISED = ["-O3", "-g", "-pthread", "-fvisibility=hidden", *HARDENED]
# Instructions that make the difference on this architecture: stores past the caches, checksums by the CPU.
EXPECTED_CODE = ("ldnp", "stnp", "crc32cx", "crc32cb")
SIMULATOR_TESTS = (
    "(bytes_move_between_processes and 9.1) or killed_peer or timeout_latches or ipc_memory or counted or slots"
)
ROUNDS = {"roundtrip": 1, "storm": 800, "close": 4, sanitize.ENDS: 1, "kill": 2, "hostile": 2, sanitize.DEVICE: 20}
WITHOUT_FOREIGN_MEMORY = ("shm",)
FUZZ_SECONDS = 1
# Simulated toolkits: (variant, string ABI of the libraries, how our loader judges it).
TOOLKITS = (("9.1", 0, "9.1+"), ("8.5", 1, "8.5"))
STEP_LIMIT_S = 300


class Failed(Exception):
    """A step went wrong; the text says which, and what it printed."""


def missing() -> list[str]:
    """Debian packages of what is not here."""
    found = {package for name, package in PACKAGES.items() if not (shutil.which(name) or os.path.isfile(name))}
    return sorted(found)


def call(command: list[str], *, limit_s: float = STEP_LIMIT_S, **environment: str) -> str:
    """Run one command; its output. Raises `Failed`."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit_s,
            env=os.environ | environment,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        said = late.output if isinstance(late.output, str) else (late.output or b"").decode(errors="replace")
        raise Failed(f"no end within {limit_s:g} s: {shlex.join(command)}\n{said[-4000:]}") from late
    if done.returncode:
        raise Failed(f"exit status {done.returncode}: {shlex.join(command)}\n{done.stdout[-8000:]}")
    return done.stdout


# -- building ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unit:
    """One file to compile."""

    source: Path
    flags: tuple[str, ...]

    @property
    def object(self) -> Path:
        folder = str(self.source.parent.relative_to(ROOT)).replace(os.sep, "-")
        return BUILD / f"{folder}-{self.source.stem}.o"


def native_units() -> list[Unit]:
    """The engine, C and C++; the generated binding is compiled too, although nothing here can load it."""
    include = f"-I{NATIVE}"
    c = ("-std=gnu11", *OPTIMISED, *WARNINGS, *STRICT, include)
    python = ("-std=gnu11", "-O1", "-fPIC", *WARNINGS, include, "-isystem", sysconfig.get_path("include"))
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / "_shim.c").write_bytes(build_shim.generate())
    sources = [*compiled(".c"), BUILD / "_shim.c"]
    units = [Unit(source, python if source.name == "_shim.c" else c) for source in sources]
    cxx = ("-std=c++17", *OPTIMISED, *WARNINGS, *STRICT, include)
    return units + [Unit(source, cxx) for source in compiled(".cc")]


def other_units() -> list[Unit]:
    """Native code beside the engine: the reference of the benchmarks, and the driver of the sanitizers' scenarios."""
    c = ("-std=gnu11", *OPTIMISED, *WARNINGS, f"-I{NATIVE}")
    folders = (ROOT / "kvxfer" / "bench", TESTS / "sanitize")
    return [Unit(source, c) for folder in folders for source in sorted(folder.glob("*.c"))]


def compile_all(units: list[Unit]) -> list[Unit]:
    """Compile what changed."""
    BUILD.mkdir(parents=True, exist_ok=True)
    around = [*headers(), *TESTS.glob("*/*.h"), Path(__file__)]
    newest = max(path.stat().st_mtime for path in around)

    def one(unit: Unit) -> None:
        if unit.object.exists() and unit.object.stat().st_mtime >= max(unit.source.stat().st_mtime, newest):
            return
        compiler = CXX if unit.source.suffix == ".cc" else CC
        call([compiler, *unit.flags, "-c", str(unit.source), "-o", str(unit.object)])

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(one, units))
    return units


def link(name: str, objects: list[Path], *, plus: bool) -> Path:
    """An executable of these objects."""
    program = BUILD / name
    call([CXX if plus else CC, "-pthread", "-o", str(program), *map(str, objects), "-ldl"])
    return program


def program(name: str, sources: list[Path], includes: list[Path]) -> Path:
    """A small program of a few C files, optimised as the engine is."""
    target = BUILD / name
    flags = ["-std=gnu11", "-O3", "-g", "-pthread", *WARNINGS, *(f"-I{path}" for path in includes)]
    call([CC, *flags, "-o", str(target), *map(str, sources)])
    return target


# -- steps ------------------------------------------------------------------------------------------------------------


def emulated(program: Path, *words: str) -> list[str]:
    return [*EMULATOR.split(), str(program), *words]


def starter(program: Path) -> Path:
    """A script that runs the program in the emulator, for a program that starts itself again."""
    script = program.with_suffix(".sh")
    script.write_text(f'#!/bin/sh\nexec {EMULATOR} -0 "$0" {shlex.quote(str(program))} "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return script


def check_code(units: list[Unit]) -> str:
    """The kernels are in the object, and not optimised or configured away."""
    [copy] = [unit.object for unit in units if unit.source.name == "copy.c"]
    code = call([OBJDUMP, "-d", str(copy)])
    counts = {word: code.count(f"\t{word}\t") for word in EXPECTED_CODE}
    if not all(counts.values()):
        raise Failed(f"copy.c was compiled without {', '.join(word for word in counts if not counts[word])}")
    return ", ".join(f"{word} x {count}" for word, count in counts.items())


def check_kernels() -> str:
    sources = [HERE / "check.c", named("auth.c"), named("stream.c")]
    return call(emulated(program("check", sources, [NATIVE]), "need-kernels"))


def fuzz(name: str) -> str:
    sources = [TESTS / "fuzz" / f"{name}.c", *map(named, ("stream.c", "auth.c", "copy.c"))]
    made = program(name, sources, [NATIVE, TESTS / "fuzz"])
    said = call(emulated(made, str(FUZZ_SECONDS), "1"))
    if int(said.split()[0]) < 10:
        raise Failed(f"{name} did next to nothing: {said}")
    return said


def scenario(driver: Path, name: str, transport: str) -> str:
    with tempfile.TemporaryDirectory(prefix="kvx") as directory:
        command = [str(starter(driver)), name, transport, directory, "1", str(ROUNDS[name])]
        settings = {"HARNESS_ALLOCATES": "1"} if transport in WITHOUT_FOREIGN_MEMORY else {}
        if name == sanitize.DEVICE:
            settings = {"KVXFER_CANN_LIBDIR": str(simulated(*TOOLKITS[0][:2])), "KVXFER_SIM_DIR": f"{directory}/sim"}
        return call(command, **settings)


# -- the accelerator's libraries, simulated ----------------------------------------------------------------------------


def simulated(variant: str, abi: int) -> Path:
    """The simulated libraries of one toolkit for this architecture."""
    command = [sys.executable, "-m", "tests.native.ascend_sim.build", "--variant", variant, "--abi", str(abi)]
    return Path(call(command, CXX=CXX).strip().splitlines()[-1])


def free_ports(count: int) -> list[str]:
    """Ports that nobody has now."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [str(server.getsockname()[1]) for server in servers]


def check_ascend(units: list[Unit], variant: str, abi: int, toolkit: str) -> str:
    """Our loader and table over the simulated libraries: names and layouts are right on this architecture too."""
    unit = Unit(HERE / "ascend_check.c", ("-std=gnu11", *OPTIMISED, *WARNINGS, *STRICT, f"-I{NATIVE}"))
    compile_all([unit])
    engine = [one.object for one in units if one.source.is_relative_to(NATIVE)]
    made = link("ascend_check", [unit.object, *engine], plus=True)
    with tempfile.TemporaryDirectory(prefix="kvx") as directory:
        environment = {"KVXFER_CANN_LIBDIR": str(simulated(variant, abi)), "KVXFER_SIM_DIR": directory}
        return call(emulated(made, toolkit, *free_ports(2)), **environment)


def check_simulator() -> str:
    """Tests of the simulated libraries themselves, across processes; all of them pass, these need few builds."""
    tests = [str(path) for path in sorted(TESTS.glob("test_ascend_sim*.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", SIMULATOR_TESTS, *tests]
    return call(command, CXX=CXX, KVXFER_TEST_EMULATOR=EMULATOR, PYTHONPATH=str(ROOT), KVXFER_TEST_LOOP="asyncio")


# -- all of it ---------------------------------------------------------------------------------------------------------


def steps(driver: Path, units: list[Unit]) -> Iterator[tuple[str, Callable[[], str]]]:
    """(name, what to do) of everything that runs."""
    yield "instructions", lambda: check_code(units)
    yield "kernels", check_kernels
    yield "fuzz stream", lambda: fuzz("fuzz_stream")
    for variant, abi, toolkit in TOOLKITS:
        yield (
            f"CANN {variant} (simulated, C++ ABI {abi})",
            lambda variant=variant, abi=abi, toolkit=toolkit: check_ascend(units, variant, abi, toolkit),
        )
    yield "simulator across processes", check_simulator
    for name, _, apart in sanitize.SCENARIOS:
        for transport in sanitize.TRANSPORTS:
            # encryption takes a libcrypto of that architecture, which no cross compiler brings
            if (
                "@" in transport
                or "+" in transport
                or (apart and transport == "loop")
                or (name == sanitize.DEVICE and transport != "loop")
            ):
                continue
            yield f"{name} {transport}", lambda name=name, transport=transport: scenario(driver, name, transport)


def main() -> int:
    """Build, run, and say what was wrong; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="WORD", help="steps whose name holds this word")
    args = parser.parse_args()
    if absent := missing():
        print(f"aarch64: not checked, tools are missing: apt-get install {' '.join(absent)}", file=sys.stderr)
        return 2
    begun = time.monotonic()
    failed = 0
    try:
        with ThreadPoolExecutor(len(TOOLKITS)) as pool:
            waiting = [pool.submit(simulated, variant, abi) for variant, abi, _ in TOOLKITS]
            units = compile_all([*native_units(), *other_units()])
            for made in waiting:
                made.result()
        linked = [unit for unit in units if unit.source.name != "_shim.c" and "bench" not in unit.source.parts]
        plus = any(unit.source.suffix == ".cc" for unit in linked)
        driver = link("driver", [unit.object for unit in linked], plus=plus)
    except Failed as failure:
        print(f"aarch64: FAIL build: {failure}", flush=True)
        return 1
    print(f"ok   build: {len(units)} files, warnings as errors, {time.monotonic() - begun:.1f} s", flush=True)
    for name, action in steps(driver, units):
        if args.only and args.only not in name:
            continue
        started = time.monotonic()
        try:
            said, verdict = action().strip(), "ok  "
        except Failed as failure:
            said, verdict, failed = str(failure), "FAIL", failed + 1
        last = said if verdict == "FAIL" else said.rpartition("\n")[2][:100]
        print(f"{verdict} {name} {time.monotonic() - started:.1f} s{': ' if last else ''}{last}", flush=True)
    print(f"aarch64: {failed} failed, {time.monotonic() - begun:.0f} s ({EMULATOR.split()[0]})", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
