"""A whole run: rounds in which everybody does each workload once, one after the other, so that a slow moment of the
machine meets all of them.

Ours come first in one round and last in the next. A run that has a time limit ends after the round that would break it
and says how many rounds there were; the numbers stay medians of what was measured.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvxfer.bench import extras, machine, ratios, reference
from kvxfer.bench.measure import Histograms, measure, mixed, verify
from kvxfer.bench.pair import Pair, connected
from kvxfer.bench.progress import Progress
from kvxfer.bench.reference import Reference
from kvxfer.bench.rows import Row, RunOptions, combine
from kvxfer.bench.work import GIB, Sizes
from kvxfer.config import CONFIG_OPTIONS
from kvxfer.errors import KvxferError, UsageError

TRANSFERS = ("W1", "W2", "W3", "W3b", "W4", "W6", "W2u", "W3u")
EXTRAS = ("setup", "submit", "idle", "scale")
DIRECTIONS = ("put", "get")
EXTRA_ROUNDS = 3
Step = Callable[[], Awaitable[list[Row]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What to measure. ``workloads`` in the order of the run; ``limit_s`` None: exactly ``rounds``."""

    workloads: tuple[str, ...]
    transports: tuple[str, ...]
    rounds: int
    sizes: Sizes
    limit_s: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    quick: bool = False


class Others(Protocol):
    """Other data movers that take their turn in every round; `benchmarks/rivals.py` has them, the package none."""

    names: tuple[str, ...]

    async def missing(self) -> dict[str, str]:
        """Those of `names` that cannot run here, with the reason."""
        ...

    async def measure(self, name: str, workload: str, options: RunOptions) -> list[Row]:
        """One round of one of them; no rows for a workload that it does not have. Raises `KvxferError`."""
        ...


@dataclass(slots=True)
class Result:
    """What came out: combined rows, all latencies, and what is missing with the reason."""

    rows: list[Row] = field(default_factory=list)
    histograms: Histograms = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)
    rounds: int = 0
    seconds: float = 0.0


class Run:
    """One run; `execute` does it."""

    def __init__(self, plan: BenchPlan, others: Others | None = None) -> None:
        self._plan, self._others = plan, others
        self._result = Result(machine=machine.describe())
        self._samples: list[Row] = []
        self._pairs: list[Pair] = []
        self._reference: Reference | None = None
        self._memory: npt.NDArray[np.uint8] | None = None
        self._begun = time.monotonic()
        self._transfers = [name for name in TRANSFERS if name in plan.workloads]
        extra = [name for name in EXTRAS if name in plan.workloads]
        steps = len(plan.transports) * 2 * len(self._transfers) * (plan.rounds + 1)
        steps += (
            len(self._transfers) * (len(plan.transports) + (0 if others is None else len(others.names))) * plan.rounds
        )
        self._progress = Progress(steps + len(extra) * len(plan.transports))

    async def execute(self) -> Result:
        """Everything, in order; children and memory are gone when it returns or raises."""
        needed, there = self._plan.sizes.memory_bytes(len(self._plan.transports)), machine.memory_bytes("MemAvailable")
        if 0 < there < needed:
            raise UsageError(
                "not enough memory for this run",
                needed=f"{needed / GIB:.1f} GiB",
                available=f"{there / GIB:.1f} GiB",
                hint="try --quick, or one of --transports",
            )
        try:
            async with AsyncExitStack() as stack:
                await self._open(stack)
                await self._verify()
                await self._extras()
                await self._rounds()
        finally:
            self._progress.close()
        self._result.rows = combine(self._samples)
        self._result.seconds = time.monotonic() - self._begun
        return self._result

    async def _open(self, stack: AsyncExitStack) -> None:
        plan = self._plan
        user = any(name.endswith("u") for name in plan.workloads)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvxfer-bench-")))
        congestion = str(plan.options.get("tcp_congestion", _default("tcp_congestion")))
        try:
            self._reference = await stack.enter_async_context(reference.running(folder, plan.sizes, congestion))
        except KvxferError as error:
            self._result.missing["references"] = error.message
        for name in plan.transports:
            self._progress.step(f"starting {name}")
            pair = connected(name, plan.sizes, plan.options, user=user)
            self._pairs.append(await stack.enter_async_context(pair))
        if "setup" in plan.workloads:
            self._memory = np.ones(plan.sizes.setup_bytes, np.uint8)

    async def _verify(self) -> None:
        for direction in DIRECTIONS:
            for pair in self._pairs:
                for side in pair.sides.values():
                    await pair.prepare(side, direction)
                for workload in self._transfers:
                    self._progress.step(f"verifying {workload} {direction}, {pair.transport.name}")
                    await verify(pair, workload, direction)
        for pair in self._pairs:
            for side in pair.sides.values():
                await pair.prepare(side, "put")  # nobody sends the zeros of the last verification

    async def _rounds(self) -> None:
        plan, begun = self._plan, time.monotonic()
        others = await self._rivals()
        for number in range(plan.rounds):
            here: list[Row] = []
            for workload in self._transfers:
                steps = [*self._reference_steps(workload), *self._rival_steps(others, workload)]
                ours = self._our_steps(workload)
                for what, step in [*ours, *steps] if number % 2 == 0 else [*steps, *ours]:
                    self._progress.step(f"round {number + 1}: {workload}, {what}")
                    here += await step()
            if number < EXTRA_ROUNDS:
                here += await self._repeated_extras(others)
            self._samples += [*here, *ratios.of_round(here)]
            self._result.rounds = number + 1
            spent = time.monotonic() - begun
            allowed = None if plan.limit_s is None else plan.limit_s - (begun - self._begun)
            if allowed is not None and spent + spent / (number + 1) > allowed:
                break

    def _our_steps(self, workload: str) -> list[tuple[str, Step]]:
        def one(pair: Pair, direction: str) -> Step:
            return lambda: measure(pair, workload, direction, self._result.histograms)

        return [
            (f"kvxfer {pair.transport.name} {direction}", one(pair, direction))
            for pair in self._pairs
            for direction in DIRECTIONS
        ]

    def _reference_steps(self, workload: str) -> list[tuple[str, Step]]:
        found = self._reference
        steps: list[tuple[str, Step]] = []
        if found is None:
            return steps
        if any(pair.transport.same_host for pair in self._pairs):
            steps.append(("plain copies", lambda: found.copies(workload)))
        if any(not pair.transport.same_host for pair in self._pairs) and not workload.endswith("u"):
            steps.append(("plain sockets", lambda: found.sockets(workload)))
        return steps

    async def _extras(self) -> None:
        """What takes longer or has no rival is measured once."""
        for pair in self._pairs:
            name, plan = pair.transport.name, self._plan
            if "idle" in plan.workloads:
                self._progress.step(f"peers, {name}")
                self._samples += await extras.crowd(pair, plan.options)
            if "setup" in plan.workloads:
                self._samples += await extras.allocate(pair)
            if "scale" in plan.workloads:
                self._progress.step(f"scales, {name}")
                for direction in DIRECTIONS:
                    self._samples += await extras.scale_blocks(pair, direction)
                self._samples += await extras.scale_descriptors(pair, "put")

    async def _repeated_extras(self, others: Sequence[str]) -> list[Row]:
        """What belongs to the first rounds."""
        found: list[Row] = []
        for pair in self._pairs:
            if "submit" in self._plan.workloads:
                found += await extras.submit(pair, "put")
            if "mixed" in self._plan.workloads:
                for direction in DIRECTIONS:
                    found += await mixed(pair, direction, self._result.histograms)
            if self._memory is not None:
                found += await extras.setup(pair, self._plan.options, self._memory)
        for what, step in self._rival_steps(others, "setup") if self._memory is not None else []:
            self._progress.step(f"setting up, {what}")
            found += await step()
        return found

    # -- other data movers ----------------------------------------------------------------------------------------

    async def _rivals(self) -> Sequence[str]:
        if self._others is None:
            return ()
        missing = await self._others.missing()
        self._result.missing.update(missing)
        return [name for name in self._others.names if name not in missing]

    def _rival_steps(self, names: Sequence[str], workload: str) -> list[tuple[str, Step]]:
        others, plan = self._others, self._plan
        if others is None or (workload.endswith("u") and workload.removesuffix("u") in self._transfers):
            return []  # their memory is always the user's
        options = RunOptions(quick=plan.quick, transports=plan.transports)

        def one(name: str) -> Step:
            async def step() -> list[Row]:
                try:
                    return await others.measure(name, workload, options)
                except KvxferError as error:
                    self._result.missing[f"{name} in {workload}"] = error.message
                    return []

            return step

        return [(name, one(name)) for name in names]


def _default(name: str) -> Any:
    return next(option.default for option in CONFIG_OPTIONS if option.name == name)
