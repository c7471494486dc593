"""A small coverage-guided fuzzer for Python: inputs that reach new lines, or lines in a new order, are kept.

    python -m tests.fuzz.guided TARGET [--seconds 60] [--seed 1] [--keep]
    python -m tests.fuzz.guided TARGET FILE...

No new dependency: `sys.settrace` on the modules under test is fast enough for inputs of a few hundred bytes. The corpus
of a target is `corpus/TARGET.txt`, an input per line in hex; `--keep` writes back what is needed for all that was
reached. An input that fails is saved, and the command that runs it again is printed.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CRASHES = ROOT / "build" / "fuzz"

Edge = tuple[CodeType, int, int]
Mutator = Callable[[bytes, list[bytes], Random], bytes]


@dataclass(frozen=True, slots=True)
class Target:
    """``check`` raises when a property does not hold for these bytes; ``modules`` are what coverage is measured in."""

    name: str
    check: Callable[[bytes], object]
    modules: tuple[str, ...]
    seeds: Callable[[], list[bytes]]
    mutate: Mutator

    @property
    def corpus(self) -> Path:
        return HERE / "corpus" / f"{self.name}.txt"

    def inputs(self) -> list[bytes]:
        """Seeds and corpus."""
        lines = self.corpus.read_text().splitlines() if self.corpus.exists() else []
        return [*self.seeds(), *(bytes.fromhex(line) for line in lines if line)]


@dataclass(slots=True)
class Coverage:
    """Pairs of lines that followed each other within a function of the modules under test."""

    files: frozenset[str]
    edges: set[Edge] = field(default_factory=set)

    def run(self, call: Callable[[], object]) -> None:
        edges, files = self.edges, self.files

        def entered(frame: FrameType, _event: str, _argument: Any) -> Any:
            code = frame.f_code
            if code.co_filename not in files:
                return None
            last = 0

            def line(inner: FrameType, event: str, _argument: Any) -> Any:
                nonlocal last
                if event == "line":
                    edges.add((code, last, inner.f_lineno))
                    last = inner.f_lineno
                elif event == "exception":
                    edges.add((code, -1, inner.f_lineno))
                return line

            return line

        before = sys.gettrace()
        sys.settrace(entered)
        try:
            call()
        finally:
            sys.settrace(before)


@dataclass(slots=True)
class Fuzzer:
    """One run over a target: ``kept`` are inputs that reached something first."""

    target: Target
    random: Random
    seen: set[Edge] = field(default_factory=set)
    kept: list[bytes] = field(default_factory=list)
    rounds: int = 0

    def edges_of(self, data: bytes) -> set[Edge]:
        files = frozenset(str(sys.modules[name].__file__) for name in self.target.modules)
        coverage = Coverage(files)
        try:
            coverage.run(lambda: self.target.check(data))
        except BaseException:
            sys.stderr.write(saved(self.target, data))
            raise
        return coverage.edges

    def feed(self, data: bytes) -> bool:
        """Run one input; whether it was new."""
        self.rounds += 1
        edges = self.edges_of(data)
        if edges <= self.seen:
            return False
        self.seen |= edges
        self.kept.append(data)
        return True

    def run(self, *, seconds: float | None = None, rounds: int | None = None) -> None:
        for data in self.target.inputs():
            self.feed(data)
        end = None if seconds is None else time.monotonic() + seconds
        limit = None if rounds is None else self.rounds + rounds
        while (end is None or time.monotonic() < end) and (limit is None or self.rounds < limit):
            recent = self.kept[-20:] if self.random.random() < 0.4 else self.kept
            self.feed(self.target.mutate(self.random.choice(recent), self.kept, self.random))

    def minimised(self) -> list[bytes]:
        """The smallest inputs that reach all of it, without what the seeds reach by themselves."""
        covered: set[Edge] = set()
        for data in self.target.seeds():
            covered |= self.edges_of(data)
        needed: list[bytes] = []
        for data in sorted(self.kept, key=lambda one: (len(one), one)):
            edges = self.edges_of(data)
            if not edges <= covered:
                covered |= edges
                needed.append(data)
        return needed

    def keep(self) -> None:
        self.target.corpus.write_text("".join(f"{data.hex()}\n" for data in self.minimised() if data))


def saved(target: Target, data: bytes) -> str:
    """Keep an input that failed; what to do with it."""
    CRASHES.mkdir(parents=True, exist_ok=True)
    path = CRASHES / f"{target.name}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return (
        f"{target.name}: failed on {data.hex()}\nagain: python -m tests.fuzz.guided {target.name} {shown}\n"
        f"then add the hex to {target.corpus.relative_to(ROOT)}\n"
    )


def main() -> int:
    from tests.fuzz.targets import TARGETS

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("files", nargs="*", type=Path, help="inputs to run again, instead of new ones")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="write the minimised corpus")
    args = parser.parse_args()
    target = TARGETS[args.target]
    for path in args.files:
        target.check(path.read_bytes())
    if args.files:
        return 0
    fuzzer = Fuzzer(target, Random(args.seed))
    fuzzer.run(seconds=args.seconds)
    if args.keep:
        fuzzer.keep()
    print(f"{target.name}: {fuzzer.rounds} inputs, {len(fuzzer.seen)} edges, {len(fuzzer.kept)} inputs were new")
    return 0


if __name__ == "__main__":
    sys.exit(main())
