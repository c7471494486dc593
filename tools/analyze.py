"""Static analysis: clang's analyzer over all native code, and any finding is a failure.

    python -m tools.analyze [--fresh] [FILE...]

A file that was found clean is not looked at again until it, a header, this program or the compiler changes (the
digests are kept in `build/analyze/`). There is no list of suppressions: what the analyzer cannot know is written as a
`KVX_ASSERT`, which then holds at run time too.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
NATIVE, BENCH = ROOT / "kvxfer" / "native", ROOT / "kvxfer" / "bench"
CLEAN = ROOT / "build" / "analyze"
GENERATED = ("api.csrc.c",)
STANDARD = {".c": "-std=gnu11", ".cc": "-std=c++17"}
OPTIONS = ("--analyze", "--analyzer-output", "text", "-Wall", "-Wextra", f"-I{NATIVE}")
CHECKERS = ("security.FloatLoopCounter", "nullability", "optin.portability.UnixAPI")
MISSING = "analyze: no clang here: install it (Debian, Ubuntu: apt-get install clang), or name one in CLANG"


def compiler() -> str:
    """The clang to ask; the program ends when there is none."""
    found = shutil.which(os.environ.get("CLANG", "clang"))
    if found is None:
        sys.exit(MISSING)
    return found


def sources() -> list[Path]:
    found = [path for folder in (NATIVE, BENCH) for suffix in STANDARD for path in sorted(folder.rglob(f"*{suffix}"))]
    return [path for path in found if path.name not in GENERATED]


def surroundings(clang: str) -> bytes:
    """Digest of all that a finding may depend on beside the file itself."""
    version = subprocess.run([clang, "--version"], capture_output=True, check=True).stdout
    digest = hashlib.sha256(version + Path(__file__).read_bytes())
    for path in sorted([*NATIVE.rglob("*.h"), *BENCH.glob("*.h")]):
        digest.update(path.read_bytes())
    return digest.digest()


def analyze(clang: str, source: Path) -> str:
    """What the analyzer says about a file; nothing when it is clean."""
    checkers = [word for checker in CHECKERS for word in ("-Xclang", f"-analyzer-checker={checker}")]
    done = subprocess.run(
        [clang, *OPTIONS, *checkers, STANDARD[source.suffix], str(source)], capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    return said or (f"{source}: {clang} ended with {done.returncode}\n" if done.returncode else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="default: all")
    parser.add_argument("--fresh", action="store_true", help="also those that were clean the last time")
    args = parser.parse_args()
    clang = compiler()
    around = surroundings(clang)
    CLEAN.mkdir(parents=True, exist_ok=True)

    def look(source: Path) -> str:
        mark = CLEAN / hashlib.sha256(around + source.name.encode() + source.read_bytes()).hexdigest()
        if mark.exists() and not args.fresh:
            return ""
        said = analyze(clang, source)
        if not said:
            mark.touch()
        return said

    chosen = args.files or sources()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        findings = [said for said in pool.map(look, chosen) if said]
    print("".join(findings), end="")
    if findings:
        print(f"analyze: {len(findings)} of {len(chosen)} files have findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
