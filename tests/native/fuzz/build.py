"""The fuzzers of the native code: what each consists of, how they are compiled, and their corpora.

libFuzzer makes the inputs, so clang and its run time libraries are needed. A corpus is a text file in `corpus/`, an
input per line in hex, smallest first.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.native.sources import NATIVE, headers, matching

HERE = Path(__file__).parent
BUILD = HERE.parent / "build" / "fuzz"
CRASHES = BUILD / "crashes"
SANITIZERS = "-fsanitize=fuzzer,address,undefined"
FLAGS = ["-O1", "-g", "-std=gnu11", "-pthread", "-Wall", "-Wextra", "-Werror", SANITIZERS, "-fno-sanitize-recover=all"]
FLAGS += ["-DLIBFUZZER", "-DKVX_SEAL_RECORDS_MAX=5"]
MISSING = (
    "the fuzzers of the native code need clang with libFuzzer and the address sanitizer. Debian, Ubuntu: "
    "apt-get install clang libclang-rt-14-dev (the number is that of `clang --version`); or name a compiler in CLANG"
)
PROBE = "int LLVMFuzzerTestOneInput(const unsigned char *d, unsigned long n) { return d && n == 99; }\n"


class ToolMissing(RuntimeError):
    """No compiler that can do it; the text says what to install."""


@dataclass(frozen=True, slots=True)
class Target:
    """A program: its name, sources beside its own, the longest input, and how much it must cover to be worth it."""

    name: str
    sources: tuple[str, ...]
    bytes_max: int
    edges_min: int

    @property
    def corpus(self) -> Path:
        return HERE / "corpus" / f"{self.name}.txt"


STREAM = ("stream.c", "auth.c", "copy.c")
TCP = (
    *STREAM,
    "vault.c",
    "table.c",
    "transport_tcp.c",
    "tcp_*.c",
    "seal.c",
    "libcrypto.c",
    "forks.c",
    "newcomers.c",
    "sockets.c",
)
SHM = ("vault.c", "auth.c", "copy.c", "forks.c", "newcomers.c", "sockets.c", "table.c", "transport_shm.c", "shm_*.c")
HIXL = (*STREAM, "vault.c", "forks.c", "newcomers.c", "sockets.c", "table.c", "transport_hixl.c", "hixl_*.c")
TARGETS = {
    target.name: target
    for target in (
        Target("fuzz_stream", STREAM, 400, 100),
        Target("fuzz_serve", TCP, 400, 250),
        Target("fuzz_dial", TCP, 500, 800),
        Target("fuzz_sealed", TCP, 400, 300),
        Target("fuzz_shm", SHM, 300, 250),
        Target("fuzz_shm_peer", SHM, 400, 400),
        Target("fuzz_hixl_owner", HIXL, 300, 350),
        Target("fuzz_hixl_peer", HIXL, 400, 500),
    )
}


def compiler() -> str:
    """A clang that has what is needed; `ToolMissing` when there is none."""
    found = shutil.which(os.environ.get("CLANG", "clang"))
    if found is None:
        raise ToolMissing(MISSING)
    command = [found, SANITIZERS, "-x", "c", "-", "-o", os.devnull]
    done = subprocess.run(command, input=PROBE, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolMissing(f"{MISSING}\n{done.stderr[-500:]}")
    return found


def built(target: Target) -> Path:
    """The program, compiled again when a source is newer than it. One process at a time."""
    clang = compiler()
    BUILD.mkdir(parents=True, exist_ok=True)
    sources = [HERE / f"{target.name}.c", *(path for one in target.sources for path in matching(one))]
    binary = BUILD / target.name
    with (BUILD / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        newest = max(one.stat().st_mtime for one in [*sources, *headers(), *HERE.glob("*.h"), Path(__file__)])
        if not binary.exists() or binary.stat().st_mtime < newest:
            made = binary.with_suffix(".new")
            command = [clang, *FLAGS, f"-I{NATIVE}", f"-I{HERE}", "-o", str(made), *map(str, sources)]
            subprocess.run(command, check=True)
            made.rename(binary)
    return binary


def unpack(target: Target, folder: Path) -> int:
    """The committed corpus as files, which is what libFuzzer takes; how many."""
    lines = target.corpus.read_text().split() if target.corpus.exists() else []
    for number, line in enumerate(lines):
        (folder / f"{number:04}").write_bytes(bytes.fromhex(line))
    return len(lines)


def pack(target: Target, folder: Path) -> int:
    """The files of a folder as the corpus to commit; how many."""
    inputs = sorted((path.read_bytes() for path in folder.iterdir()), key=lambda data: (len(data), data))
    target.corpus.parent.mkdir(exist_ok=True)
    target.corpus.write_text("".join(f"{data.hex()}\n" for data in inputs if data))
    return len(inputs)


def command(target: Target, folder: Path, seconds: float, seed: int) -> list[str]:
    """One run; new inputs go to `folder`, one that fails to `CRASHES`."""
    CRASHES.mkdir(parents=True, exist_ok=True)
    options = [f"-max_total_time={max(1, round(seconds))}", f"-max_len={target.bytes_max}", f"-seed={seed}"]
    # libFuzzer asks the kernel for the peak of resident memory, which a process inherits from the one that started it;
    # a large allocation is seen by itself.
    bounds = ["-timeout=20", "-rss_limit_mb=0", "-malloc_limit_mb=256"]
    options += [f"-artifact_prefix={CRASHES}/{target.name}-", *bounds]
    return [str(built(target)), *options, "-print_final_stats=1", "-verbosity=1", str(folder)]


def minimise(target: Target, folder: Path, result: Path) -> None:
    """Keep of `folder` what is needed for what it covers."""
    step = [str(built(target)), "-merge=1", f"-max_len={target.bytes_max}", str(result), str(folder)]
    subprocess.run(step, check=True, capture_output=True)
