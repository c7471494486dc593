"""A prompt is prefilled in one process and decoded in another; kvxfer moves the KV cache between two node daemons.

Four processes besides this one: daemon A, daemon B, a prefill worker on A, a decode worker on B (`demo_worker.py`, with
the model of `tiny_model.py`). Every generated token is compared with an undivided run of the model in this process.

Exit status: 0 all tokens equal; 1 one differs (which is what --damage must lead to) or something failed; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for _place in (HERE.parent, HERE):  # a checkout needs no installation
    if str(_place) not in sys.path:
        sys.path.insert(0, str(_place))

from examples.child_processes import Process, daemon, python_process  # noqa: E402
from examples.remote_worker import Remote, WorkerFailed  # noqa: E402
from kvxfer.config.paths import make_scratch_dir  # noqa: E402
from kvxfer.errors import ConfigError, KvxferError  # noqa: E402

# Two BLAS threads on two cores wait for each other in busy loops, and a sum must not depend on how many there are.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
TABLE_SEEDS = {"prefill": 11, "decode": 22}  # which blocks of its pool hold the request, on each side
CARDS = {"prefill": 0, "decode": 1}  # with --memory hbm; where there is only one card both use it
STDERR_LINES = 20
DEATH_S = 0.5  # so long after a failure it is known who has died


@dataclass(frozen=True, slots=True)
class Way:
    """How a cache gets from A to B: what the prefill worker does, what the decode worker does, who is timed."""

    source: str
    target: str
    timed: str
    arguments: dict[str, Any]
    transports: tuple[str, ...] = ("hixl", "shm", "tcp")
    together: bool = True  # both sides at once, or the decode worker only when the push is over


WAYS = {
    "push": Way("push", "land", "source", {}),
    "pull": Way("publish", "pull", "target", {}),
    # The last step of a cache that landed in daemon B: its worker maps memory of that daemon, so it is on B's host.
    "adopt": Way("push", "adopt", "target", {"land": True}, transports=("shm",), together=False),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result: medians over the timed transfers."""

    transport: str
    way: str
    bytes: int
    ms: float
    copies: float
    tokens: list[int]
    memory: str  # of the caches


class Progress:
    """One line that says what is going on; plain lines where nobody looks at a terminal."""

    def __init__(self, steps: int) -> None:
        self._steps, self._done, self._started = steps, 0, time.perf_counter()
        self._live = sys.stderr.isatty()

    def step(self, text: str) -> None:
        """The next step begins."""
        self._done += 1
        seconds = time.perf_counter() - self._started
        line = f"[{self._done}/{self._steps}] {seconds:5.1f} s  {text}"
        print(f"\r{line:<78}" if self._live else line, end="" if self._live else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clear the line."""
        if self._live:
            print("\r" + " " * 78 + "\r", end="", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Workers:
    """The two worker processes."""

    prefill: Remote
    decode: Remote


# -- one transfer -----------------------------------------------------------------------------------------


async def run_way(name: str, transport: str, workers: Workers, opened: dict[str, Any], args: argparse.Namespace) -> Row:
    """A real request whose tokens are kept, then the same transfer a few times without computing."""
    way, to = WAYS[name], opened["addresses"]
    request = f"{name}-{transport}"
    _, decoded = await transfer(way, request, workers, to, compute=True, damage=args.damage)
    timed, copied, moved = [], 0, 0
    for index in range(args.repeat):
        source, target = await transfer(way, f"{request}-{index}", workers, to, compute=False, damage=False)
        timed.append(source["ms"] if way.timed == "source" else target["ms"])
        copied += target["copied"] + (source["copied"] if way.together else 0)
        moved += source["moved"] + target["moved"]
    ms, copies = statistics.median(timed), copied / max(moved, 1)
    return Row(transport, name, moved // args.repeat, ms, copies, decoded["tokens"], opened["memory"])


async def transfer(
    way: Way, request: str, workers: Workers, to: list[str], *, compute: bool, damage: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both workers do their part of one request; what each of them measured."""

    def source() -> Coroutine[Any, Any, dict[str, Any]]:
        return workers.prefill.do(way.source, request=request, to=to, compute=compute, **way.arguments)

    def target() -> Coroutine[Any, Any, dict[str, Any]]:
        return workers.decode.do(way.target, request=request, damage=damage)

    if way.together:
        return await both(source(), target())
    return await source(), await target()


async def both(*sides: Coroutine[Any, Any, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two sides at the same time; when one fails, the other is not waited for."""
    try:
        async with asyncio.TaskGroup() as group:
            first, second = (group.create_task(side) for side in sides)
    except ExceptionGroup as failed:
        raise Failed("\n".join(str(failure) for failure in failed.exceptions)) from failed
    return first.result(), second.result()


# -- processes --------------------------------------------------------------------------------------------


class Failed(Exception):
    """The demonstration cannot go on; the text says why."""


@asynccontextmanager
async def cluster(args: argparse.Namespace, progress: Progress) -> AsyncIterator[Workers]:
    """Two daemons with a worker each. All four, and their directory, are gone when the block is left."""
    processes: list[Process] = []
    async with AsyncExitStack() as stack:
        try:
            scratch = make_scratch_dir("kvxfer-demo-", below="/daemon-a")
        except ConfigError as nowhere:
            raise Failed(str(nowhere)) from nowhere
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        stack.callback(progress.end)
        try:
            progress.step("starting daemons A and B")
            sockets = {}
            for role, name in (("prefill", "daemon-a"), ("decode", "daemon-b")):
                node = await stack.enter_async_context(daemon(scratch / name, name=name))
                processes.append(node.process)
                sockets[role] = str(node.socket)
            progress.step("starting the prefill worker on A and the decode worker on B")
            for role, socket in sockets.items():
                processes.append(await stack.enter_async_context(worker(role, socket, args)))
            prefill, decode = (Remote(process, args.timeout + 30) for process in processes[2:])
            yield Workers(prefill, decode)
        except (KvxferError, WorkerFailed, Failed) as failure:
            progress.end()
            said = [line.partition("; its stderr: ")[0] for line in str(failure).splitlines()]  # shown in full below
            # Others hear of an end before this program knows its status.
            await asyncio.gather(*(process.ended_within(DEATH_S) for process in processes))
            raise Failed("\n  ".join(said) + last_words(processes)) from failure


def worker(role: str, socket: str, args: argparse.Namespace) -> Any:
    """A worker process beside a daemon."""
    settings = {
        "socket": socket,
        "prompt": str(args.prompt),
        "steps": args.tokens,
        "table_seed": TABLE_SEEDS[role],
        "timeout": args.timeout,
        "card": CARDS[role] if args.memory == "hbm" else None,
    }
    environment = {**ONE_THREAD, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return python_process([str(HERE / "demo_worker.py"), json.dumps(settings)], name=role, environment=environment)


def last_words(processes: Sequence[Process]) -> str:
    """What each process wrote to its stderr before the demonstration failed, and how it ended if it did."""
    text = ""
    for process in processes:
        lines = list(process.stderr)[-STDERR_LINES:]
        if process.returncode is not None:
            lines.append(f"(ended with status {process.returncode})")
        text += "".join(f"\n  {process.name} | {line}" for line in lines)
    return text


# -- all of it --------------------------------------------------------------------------------------------


async def demonstrate(args: argparse.Namespace, progress: Progress) -> list[Row]:
    """Every way over every transport."""
    rows = []
    async with cluster(args, progress) as workers:
        for transport in args.transports:
            progress.step(f"{transport}: opening clients")
            await workers.prefill.do("open", transport=transport)
            opened = await workers.decode.do("open", transport=transport)
            for name in args.ways:
                if transport in WAYS[name].transports:
                    progress.step(f"{transport}: {name}, decode {args.tokens} tokens, then the transfer alone")
                    rows.append(await run_way(name, transport, workers, opened, args))
            await workers.prefill.do("close")
            await workers.decode.do("close")
    return rows


async def until_told(args: argparse.Namespace, progress: Progress) -> list[Row]:
    """The same, and SIGTERM ends it as Ctrl-C does: with everything put away."""
    task = asyncio.current_task()
    assert task is not None
    told: list[bool] = []

    def stop() -> None:
        told.append(True)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        return await demonstrate(args, progress)
    except Failed:
        if told:  # Ctrl-C reaches the workers as well, and one of them was quicker
            raise asyncio.CancelledError from None
        raise


def report(rows: list[Row], expected: list[int], args: argparse.Namespace) -> int:
    """The table, and the exit status."""
    print(f"{'transport':<10} {'way':<6} {'bytes':>12} {'ms':>9} {'GB/s':>7} {'copies/byte':>12}  verified")
    for row in rows:
        rate = "-" if not WAYS[row.way].together else f"{row.bytes / row.ms / 1e6:.2f}"
        numbers = f"{row.bytes:>12} {row.ms:>9.2f} {rate:>7} {row.copies:>12.2f}"
        print(f"{row.transport:<10} {row.way:<6} {numbers}  {compare(expected, row.tokens)}")
    print(f"\nms: median of {args.repeat} transfers of the whole cache with rendezvous and commit, without computing")
    print("copies/byte: by the CPU, counted by both workers' engines (tcp: out of the kernel, a get also into it)")
    for memory in sorted({row.memory for row in rows if row.memory != "host memory"}):
        print(f"memory of both caches: {memory}")
        if "(simulated)" in memory:
            print("no figure of a simulator is a hardware figure")
    if any(row.way == "adopt" for row in rows):
        print("adopt: the cache was pushed into daemon B before; its worker maps it and decodes from it in place")
    wrong = sum(row.tokens != expected for row in rows)
    if args.damage:
        caught = "every damaged cache gave other tokens" if wrong == len(rows) else "A DAMAGED CACHE WENT UNNOTICED"
        print(f"--damage: {caught}; exit status 1")
        return 1
    print(f"{wrong} of {len(rows)} runs DIFFER from the undivided run" if wrong else "all verified")
    return 1 if wrong else 0


def compare(expected: Sequence[int], got: Sequence[int]) -> str:
    """What the table says about the tokens."""
    if list(expected) == list(got):
        return f"{len(got)} tokens equal"
    pairs = zip(expected, got, strict=False)
    first = next((i for i, (left, right) in enumerate(pairs) if left != right), min(len(expected), len(got)))
    return f"TOKEN {first} DIFFERS"


def configure(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--prompt", type=Path, default=HERE.parent / "README.md", help="text file (default: kvxfer's README)")
    add("--tokens", type=number(1, 512), default=48, metavar="N", help="tokens to decode (default 48)")
    add("--transports", type=choices("hixl", "shm", "tcp"), default="shm,tcp", metavar="A,B", help="default shm,tcp")
    add("--memory", choices=("dram", "hbm"), default="dram", help="hbm: both caches on Ascend cards (default dram)")
    add("--ways", type=choices(*WAYS), default=",".join(WAYS), metavar="A,B", help=f"default {','.join(WAYS)}")
    add("--repeat", type=number(1, 1000), default=5, metavar="N", help="timed transfers per line (default 5)")
    add("--timeout", type=number(1, 3600), default=20, metavar="SECONDS", help="for each step (default 20)")
    add("--damage", action="store_true", help="damage the cache after it arrived: the tokens must differ")


def number(low: int, high: int) -> Any:
    """An argument type: an integer in a range."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low} to {high}")
        return int(text)

    return parse


def choices(*known: str) -> Any:
    """An argument type: a comma list of distinct known words."""

    def parse(text: str) -> list[str]:
        words = text.split(",")
        if not set(words) <= set(known) or len(set(words)) < len(words):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(known)}")
        return words

    return parse


def run(args: argparse.Namespace) -> int:
    """The whole demonstration; returns the exit status."""
    os.environ.update(ONE_THREAD)
    for name in [name for name in os.environ if name.startswith("KVXFER_")]:
        if not name.startswith(("KVXFER_CANN_", "KVXFER_SIM_")):
            del os.environ[name]  # what is configured on this host is for other daemons
    args.prompt = args.prompt.resolve()
    try:
        prompt = args.prompt.read_bytes()
    except OSError as failure:
        print(f"demo: cannot read --prompt {args.prompt}: {failure.strerror}", file=sys.stderr)
        return 2
    used = [way for way in args.ways if set(WAYS[way].transports) & set(args.transports)]
    if not used:
        print(f"demo: {','.join(args.ways)} does not go over {','.join(args.transports)}", file=sys.stderr)
        return 2
    runs = sum(transport in WAYS[way].transports for way in used for transport in args.transports)
    progress = Progress(3 + len(args.transports) + runs)
    try:
        # Only now: BLAS reads the number of threads when numpy is loaded.
        from demo_worker import BLOCK_TOKENS, SEED
        from tiny_model import run_undivided

        progress.step("undivided run of the model in this process")
        expected, length = run_undivided(prompt, seed=SEED, steps=args.tokens, block_tokens=BLOCK_TOKENS)
        rows = asyncio.run(until_told(args, progress))
    except Failed as failure:
        print(f"demo failed: {failure}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("demo: interrupted; daemons and workers have ended", file=sys.stderr)
        return 130
    cut = f" (the first {length - 1} of {len(prompt)} bytes)" if length - 1 < len(prompt) else ""
    print(f"prompt {args.prompt.name}: {length} tokens{cut}; {args.tokens} more decoded on the other node\n")
    return report(rows, expected, args)


def main() -> int:
    """From the command line."""
    parser = argparse.ArgumentParser(prog="demo")
    configure(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
