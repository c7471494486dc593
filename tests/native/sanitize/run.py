"""Builds the native engine and a C driver without Python, once per sanitizer, and runs every scenario: zero reports.

    python tests/native/sanitize/run.py [--sanitizer address|thread] [--transport shm] [--scenario storm] [--seed 7]

What the thread sanitizer says is repaired. The one suppression is about the C library alone: `tsan.txt` says why.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent
NATIVE = ROOT / "kvxfer" / "native"
BUILD = ROOT / "tests" / "native" / "build"

SANITIZERS = {"address": "address,undefined", "thread": "thread"}
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Werror"]
# Never optimised away, one report ends the run, exit status 99 is a sanitizer's.
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=1:exitcode=99:detect_stack_use_after_return=1:strict_string_checks=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1:exitcode=99",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=99:second_deadlock_stack=1:history_size=4"
    f":suppressions={Path(__file__).with_name('tsan.txt')}",
}
ENDS = "ends"
DEVICE = "device"  # over simulated cards, and no transport of its own: runs with `loop` only
# (scenario, rounds, needs another process)
SCENARIOS = (
    ("roundtrip", 1, False),
    ("storm", 6000, False),
    ("close", 12, False),
    (ENDS, 3, False),
    ("kill", 4, True),
    ("hostile", 6, True),
    (DEVICE, 60, False),
)
TRANSPORTS = ("loop", "shm", "tcp", "tcp@encrypted", "fault+loop", "fault+shm", "fault+tcp")
ON_CARDS = "hixl"  # all memory is that of two simulated cards; scenarios of one process
ON_CARDS_ROUNDS = {"storm": 1500}  # nothing of it completes within the call
FAULTY = ("storm", "close", "ends")  # scenarios that expect nothing of an operation but its end
TIME_LIMIT_S = 300


def compiler() -> str:
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    if not found:
        sys.exit("sanitize: no C compiler found; install gcc or set CC")
    return found


def plus_compiler() -> str:
    """For the C++ file, and to link: of the same make as the C compiler, as both bring a run time of the sanitizer."""
    own = "clang++" if "clang" in Path(compiler()).name else "g++"
    found = os.environ.get("CXX") or shutil.which(own) or shutil.which("c++")
    if not found:
        sys.exit("sanitize: no C++ compiler found; install g++ or set CXX")
    return found


def step(command: list[str]) -> None:
    """One call of the compiler; what it says is enough when it fails."""
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"sanitize: failed: {' '.join(command)}")


def build(sanitizer: str) -> Path:
    """Compile what changed; returns the driver. One process at a time: the folder is shared."""
    folder = BUILD / sanitizer
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return compile_all(sanitizer, folder)


def compile_all(sanitizer: str, folder: Path) -> Path:
    sources = [
        *(path for path in sorted(NATIVE.rglob("*.c")) if path.name != "api.csrc.c"),
        *sorted(NATIVE.rglob("*.cc")),
    ]
    sources += sorted(HERE.glob("*.c"))
    newest_header = max(path.stat().st_mtime for path in [*NATIVE.rglob("*.h"), *HERE.glob("*.h"), Path(__file__)])
    flags = [f"-fsanitize={SANITIZERS[sanitizer]}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g"]
    flags += ["-O1", "-pthread", f"-I{NATIVE}", *WARNINGS]
    flags += ["-DKVX_SEAL_RECORDS_MAX=7"]  # so that keys change all the time
    by_suffix = {".c": [compiler(), "-std=gnu11"], ".cc": [plus_compiler(), "-std=c++17"]}

    def compile_one(source: Path) -> Path:
        target = folder / (source.stem + ".o")
        if not target.exists() or target.stat().st_mtime < max(source.stat().st_mtime, newest_header):
            step([*by_suffix[source.suffix], *flags, "-c", str(source), "-o", str(target)])
        return target

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(compile_one, sources))
    driver = folder / "driver"
    if not driver.exists() or driver.stat().st_mtime < max(path.stat().st_mtime for path in objects):
        made = folder / "driver.new"
        step([plus_compiler(), *flags, "-o", str(made), *map(str, objects), "-ldl"])
        made.rename(driver)  # whoever runs the old one keeps it
    return driver


def cards(directory: str, hbm: str) -> dict[str, str]:
    """Simulated ones."""
    sys.path.insert(0, str(ROOT))
    from tests.native.ascend_sim.build import build as libraries

    return {"KVXFER_CANN_LIBDIR": str(libraries()), "KVXFER_SIM_DIR": directory + "/sim", "KVXFER_SIM_HBM": hbm}


def run(driver: Path, scenario: str, transport: str, seed: int, rounds: int) -> tuple[bool, str]:
    """Whether the scenario ended well, and what it printed."""
    with tempfile.TemporaryDirectory(prefix="kvx") as directory:
        command = [str(driver), scenario, transport, directory, str(seed), str(rounds)]
        # In one scenario there is so little memory that it is full now and then.
        seen = (
            cards(directory, "24M" if scenario == DEVICE else "128M")
            if scenario == DEVICE or transport == ON_CARDS
            else {}
        )
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **ENVIRONMENT, **seen},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=TIME_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            return False, (late.output or b"").decode(errors="replace") + f"\nno end within {TIME_LIMIT_S} s"
    text = done.stdout.decode(errors="replace")
    reported = "Sanitizer" in text or "runtime error" in text
    return done.returncode == 0 and not reported, text + (f"\nexit status {done.returncode}" if done.returncode else "")


def run_and_tell(driver: Path, sanitizer: str, scenario: str, transport: str, seed: int, rounds: int) -> bool:
    begun = time.monotonic()
    good, text = run(driver, scenario, transport, seed, rounds)
    taken = time.monotonic() - begun
    told = f"{'ok  ' if good else 'FAIL'} {sanitizer} {scenario} {transport} seed={seed} {taken:.1f} s"
    print(told if good else f"{told}\n{text[-8000:]}", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sanitizer", choices=SANITIZERS, action="append")
    parser.add_argument("--transport", choices=(*TRANSPORTS, ON_CARDS), action="append")
    parser.add_argument("--scenario", choices=[name for name, _, _ in SCENARIOS], action="append")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--times", type=int, default=1, help="run each this often, with growing seeds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="scenarios side by side")
    args = parser.parse_args()
    wanted: list[tuple[str, str, str, int, int]] = []
    for scenario, rounds, apart in SCENARIOS:
        for sanitizer in args.sanitizer or SANITIZERS:
            for transport in args.transport or (*TRANSPORTS, ON_CARDS):
                chosen = not args.scenario or scenario in args.scenario
                if not chosen or (apart and transport == "loop") or ("+" in transport and scenario not in FAULTY):
                    continue
                if (scenario == DEVICE and transport != "loop") or (apart and transport == ON_CARDS):
                    continue
                times = ON_CARDS_ROUNDS.get(scenario, rounds) if transport == ON_CARDS else rounds
                wanted += [(sanitizer, scenario, transport, args.seed + n, times) for n in range(args.times)]
    drivers: dict[str, Path] = {}
    for sanitizer in args.sanitizer or SANITIZERS:
        print(f"== {SANITIZERS[sanitizer]}: compiling", flush=True)
        drivers[sanitizer] = build(sanitizer)
    passed = failed = 0
    with ThreadPoolExecutor(max(1, args.jobs)) as pool:
        for good in pool.map(lambda one: run_and_tell(drivers[one[0]], *one), wanted):
            passed, failed = passed + good, failed + (not good)
    print(f"sanitizers: {passed} passed, {failed} failed", flush=True)
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
