"""Makes an environment per peer, with pinned versions: `make bench-peers`.

Every peer is tried; one that cannot be installed, or cannot be imported afterwards, is named with the reason and what
to do, and the others go on. The outcome of each is kept in ``FOLDER/NAME.json``, which `kvxfer.bench.rivals` reads.
What is up to date is left alone, so a second run takes seconds. Needs nothing but Python; always ends with status 0.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
STEP_S = 900
TAIL_CHARS = 300
# name → modules that must be importable there
ENVIRONMENTS = {
    "tcp": "numpy, uvloop",
    "zmq": "numpy, zmq",
    "grpc": "numpy, grpc",
    "memcached": "numpy, pymemcache",
    "redis": "numpy, redis",
    "nixl": "numpy, nixl_cu12._api",
    "mooncake": "numpy, mooncake.engine",
    "ucx": "numpy, libucx, ucxx",
}
PROGRAMS = ("redis-server", "memcached", "iperf3")
HINTS = {"libibverbs.so.1": "apt-get install libibverbs1", "librdmacm.so.1": "apt-get install librdmacm1"}


class Failed(Exception):
    """A step did not work; the text says why."""


def step(*command):
    """Run a command quietly; its last words are the reason when it fails."""
    try:
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, check=False, timeout=STEP_S
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"not done in {STEP_S} s") from None
    except OSError as wrong:
        raise Failed(str(wrong)) from None
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).strip().splitlines() if line.strip()]
        errors = [line for line in lines if "rror" in line] or lines[-1:] or [f"status {done.returncode}"]
        reason = errors[-1].strip()[:TAIL_CHARS]
        hint = next((f" ({hint})" for library, hint in HINTS.items() if library in reason), "")
        raise Failed(reason + hint)


def make(name, folder, pinned):
    """A fresh environment; packages exactly as pinned, so no dependency is resolved."""
    place = folder / name
    shutil.rmtree(place, ignore_errors=True)
    step(sys.executable, "-m", "venv", place)
    pip = (place / "bin" / "python", "-m", "pip", "--disable-pip-version-check")
    step(*pip, "install", "--quiet", "--no-deps", "--only-binary", ":all:", "-r", pinned)


def check(name, folder):
    """It can be imported, and what is compiled against it can be compiled."""
    python = folder / name / "bin" / "python"
    step(python, "-c", f"import {ENVIRONMENTS[name]}")
    if name == "ucx":
        step(python, HERE / "ucx_peer.py", "--build")


def install(name, folder):
    """Make or check one; returns what to say about it."""
    stamp, pinned = folder / f"{name}.json", HERE / "requirements" / f"{name}.txt"
    text, begun, error = pinned.read_text(encoding="utf-8"), time.monotonic(), None
    try:
        known = json.loads(stamp.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    fresh = known.get("requirements") == text and known.get("made") and (folder / name / "bin" / "python").exists()
    made = bool(fresh)
    try:
        if not fresh:
            make(name, folder, pinned)
            made = True
        check(name, folder)
    except Failed as wrong:
        error = str(wrong)
    stamp.write_text(json.dumps({"requirements": text, "made": made, "error": error}), encoding="utf-8")
    if error is not None:
        return f"MISSING: {error}"
    return "is up to date" if fresh else f"installed in {time.monotonic() - begun:.0f} s"


def main():
    """All of them, or those that are named."""
    parser = argparse.ArgumentParser(prog="make bench-peers", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="which ones: " + ", ".join(ENVIRONMENTS))
    parser.add_argument("--folder", type=Path, default=HERE.parent.parent / ".bench-peers", help="where they go")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in ENVIRONMENTS]
    if unknown:
        parser.error("unknown: " + ", ".join(unknown))
    args.folder.mkdir(parents=True, exist_ok=True)
    names = args.names or list(ENVIRONMENTS)
    for number, name in enumerate(names, 1):
        print(f"[{number}/{len(names)}] {name} ...", end=" ", flush=True)
        print(install(name, args.folder), flush=True)
    for program in PROGRAMS:
        missing = f"MISSING: install it (Debian: apt-get install {program})"
        print(f"{program} ... {'is on the PATH' if shutil.which(program) else missing}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
