"""All fuzzers for some minutes: `make fuzz MINUTES=5`. Each gets the same share, and a processor.

A fault is saved, and the command that runs it again is printed. With ``--keep`` what was reached anew goes into the
corpora of the tree, minimised: look at the difference and commit it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fuzz.targets import TARGETS
from tests.native.fuzz import build

ROOT = Path(__file__).parent.parent.parent


def in_python(name: str, seconds: float, seed: int, keep: bool) -> tuple[bool, str]:
    command = [sys.executable, "-m", "tests.fuzz.guided", name, f"--seconds={seconds}", f"--seed={seed}"]
    done = subprocess.run(
        [*command, *(["--keep"] if keep else [])],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode == 0, done.stdout


def in_c(name: str, seconds: float, seed: int, keep: bool) -> tuple[bool, str]:
    target = build.TARGETS[name]
    with tempfile.TemporaryDirectory() as found, tempfile.TemporaryDirectory() as needed:
        build.unpack(target, Path(found))
        done = subprocess.run(
            build.command(target, Path(found), seconds, seed),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        lines = [line for line in done.stdout.splitlines() if "cov:" in line or "number_of_executed" in line]
        if done.returncode:
            saved = [line.partition("written to ")[2] for line in done.stdout.splitlines() if "written to " in line]
            again = "".join(f"again: {build.BUILD / name} {path}\n" for path in saved)
            return False, f"{done.stdout[-6000:]}\n{again}"
        if keep:
            build.minimise(target, Path(found), Path(needed))
            build.pack(target, Path(needed))
    return True, f"{name}: " + " ".join(" ".join(line.split()) for line in lines[-2:]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5, help="of all together")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000)
    parser.add_argument("--keep", action="store_true", help="write the minimised corpora")
    args = parser.parse_args()
    try:
        build.compiler()
    except build.ToolMissing as missing:
        sys.exit(f"fuzz: {missing}")
    jobs = os.cpu_count() or 1
    share = args.minutes * 60 * jobs / (len(TARGETS) + len(build.TARGETS))
    print(f"fuzz: seed {args.seed}, {share:.0f} s each", flush=True)
    failed = 0
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(in_c, name, share, args.seed, args.keep) for name in build.TARGETS]
        running += [pool.submit(in_python, name, share, args.seed, args.keep) for name in TARGETS]
        for one in running:
            good, text = one.result()
            print(text, end="", flush=True)
            failed += not good
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
