"""A prompt is prefilled in one process and decoded in another; kvxfer moves the KV cache between two node daemons.

Four processes besides this one: daemon A, daemon B, a prefill worker on A, a decode worker on B. Every generated
token is compared with an undivided run of the same model in this process. Exit status 0: all tokens equal; 1: one
differs (which is what --damage must lead to) or something failed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # a checkout needs no installation

from kvxfer.testing.processes import daemon, python_process  # noqa: E402
from kvxfer.testing.worker import Remote, WorkerFailed  # noqa: E402

SEED = 7
SOURCE_SEED, TARGET_SEED = 11, 22  # which blocks of the pool hold the request, on each side
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result."""

    transport: str
    way: str
    bytes: int
    ms: float
    copies: float
    verified: str


class Progress:
    """One line that says what is going on; plain lines where nobody looks at a terminal."""

    def __init__(self, steps: int) -> None:
        self._steps, self._done, self._started = steps, 0, time.perf_counter()
        self._live = sys.stderr.isatty()

    def step(self, text: str) -> None:
        self._done += 1
        seconds = time.perf_counter() - self._started
        line = f"[{self._done}/{self._steps}] {seconds:5.1f} s  {text}"
        print(f"\r{line:<78}" if self._live else line, end="" if self._live else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._live:
            print("\r" + " " * 78 + "\r", end="", file=sys.stderr, flush=True)


def undivided(prompt: Path, steps: int) -> tuple[list[int], int]:
    """The same model, prefill and decode in one go: the tokens that every divided run must reproduce."""
    from demo_worker import BLOCK_TOKENS
    from tiny_model import run_undivided

    return run_undivided(prompt.read_bytes(), seed=SEED, steps=steps, block_tokens=BLOCK_TOKENS)


async def one_way(
    way: str, transport: str, prefill: Remote, decode: Remote, node: list[str], args: argparse.Namespace
) -> tuple[list[int], list[float], float, int]:
    """A real request, then the same transfer a few times without computing: tokens, ms, copies per byte, bytes."""
    request = f"{way}-{transport}"
    names = {"push": ("push_prefill", "land_decode"), "pull": ("publish_prefill", "pull_decode")}[way]
    await decode.do("wipe")
    _, answer = await both(
        prefill.do(names[0], request=request, to=node, seed=SOURCE_SEED),
        decode.do(names[1], request=request, seed=TARGET_SEED, damage=args.damage),
    )
    again = {"push": ("push_again", "land_again"), "pull": ("publish_again", "pull_again")}[way]
    taken, copied, moved = [], 0, 0
    for index in range(args.repeat):
        first, second = await both(
            prefill.do(again[0], request=f"{request}-{index}", to=node, seed=SOURCE_SEED),
            decode.do(again[1], request=f"{request}-{index}", seed=TARGET_SEED),
        )
        taken.append(first.get("ms") or second["ms"])
        copied += first["copied"] + second["copied"]
        moved += first["moved"] + second["moved"]
    return answer["tokens"], taken, copied / moved, moved // args.repeat


async def both(left: Any, right: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both sides of one transfer at the same time."""
    first, second = await asyncio.gather(left, right, return_exceptions=True)
    for answer in (first, second):
        if isinstance(answer, BaseException):
            raise answer
    return first, second


async def adoption(transport: str, prefill: Remote, decode: Remote, node: list[str]) -> Row:
    """A push whose decode worker is not chosen yet: it lands in daemon B, the worker maps it later."""
    request = f"adopt-{transport}"
    pushed = await prefill.do("push_again", request=request, to=node, seed=SOURCE_SEED, land=True)
    adopted = await decode.do("adopt", request=request)
    source = await prefill.do("digest", seed=SOURCE_SEED)
    equal = adopted["digest"] == source["digest"]
    verified = "bytes equal" if equal else "BYTES DIFFER"
    return Row(transport, "adopt", pushed["moved"], adopted["ms"], adopted["copied"] / pushed["moved"], verified)


async def run(args: argparse.Namespace) -> int:
    """All of it; returns the exit status."""
    prompt: Path = args.prompt
    transports, ways = args.transports.split(","), args.ways.split(",")
    progress = Progress(3 + 2 * len(transports) + len(transports) * len(ways))
    progress.step("undivided run of the model in this process")
    expected, prompt_tokens = undivided(prompt, args.tokens)
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvxfer-demo-")))
        progress.step("starting daemons A and B")
        nodes = [await stack.enter_async_context(daemon(scratch / name, name=f"daemon-{name}")) for name in "ab"]
        progress.step("starting the prefill worker on A and the decode worker on B")
        prefill, decode = [
            await start_worker(stack, role, node.socket, prompt, args)
            for role, node in zip(("prefill", "decode"), nodes, strict=True)
        ]
        for transport in transports:
            progress.step(f"{transport}: opening clients")
            await prefill.do("open", transport=transport)
            node = (await decode.do("open", transport=transport))["addresses"]
            for way in ways:
                progress.step(f"{transport}: {way}, decode {args.tokens} tokens, then the transfer alone")
                tokens, taken, copies, size = await one_way(way, transport, prefill, decode, node, args)
                rows.append(Row(transport, way, size, statistics.median(taken), copies, compare(expected, tokens)))
            if transport == "shm" and not args.damage:
                rows.append(await adoption(transport, prefill, decode, node))
            progress.step(f"{transport}: closing clients")
            await prefill.do("close")
            await decode.do("close")
    progress.end()
    return report(rows, prompt, prompt_tokens, expected, args)


async def start_worker(
    stack: AsyncExitStack, role: str, socket: Path, prompt: Path, args: argparse.Namespace
) -> Remote:
    """A worker process beside a daemon."""
    command = [str(HERE / "demo_worker.py"), str(socket), str(prompt), str(SEED), str(args.tokens), str(args.timeout)]
    environment = {**ONE_THREAD, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    process = await stack.enter_async_context(python_process(command, name=role, environment=environment))
    return Remote(process, args.timeout + 30)


def compare(expected: Sequence[int], got: Sequence[int]) -> str:
    """What the table says about the tokens."""
    if list(expected) == list(got):
        return f"{len(got)} tokens equal"
    first = next(
        (i for i, pair in enumerate(zip(expected, got, strict=False)) if pair[0] != pair[1]),
        min(len(expected), len(got)),
    )
    return f"TOKEN {first} DIFFERS"


def report(rows: list[Row], prompt: Path, prompt_tokens: int, expected: list[int], args: argparse.Namespace) -> int:
    """The table, and the exit status."""
    print(f"prompt {prompt.name}: {prompt_tokens} tokens; {len(expected)} tokens decoded on the other node")
    print(f"{'transport':<10} {'way':<6} {'bytes':>12} {'ms':>9} {'GB/s':>7} {'copies/byte':>12}  verified")
    for row in rows:
        rate = row.bytes / row.ms / 1e6
        numbers = f"{row.bytes:>12} {row.ms:>9.2f} {rate:>7.2f} {row.copies:>12.2f}"
        print(f"{row.transport:<10} {row.way:<6} {numbers}  {row.verified}")
    print(f"ms: median of {args.repeat} transfers of the whole cache with rendezvous and commit, without computing.")
    print("copies/byte: counted by the engines of both workers (tcp: one into and one out of the kernel).")
    wrong = [row for row in rows if "DIFFER" in row.verified]
    if args.damage:
        caught = "the check caught the damaged cache" if len(wrong) == len(rows) else "A DAMAGED CACHE WENT UNNOTICED"
        print(f"--damage: {caught}; exit status 1")
        return 1
    print("all verified" if not wrong else f"{len(wrong)} of {len(rows)} runs differ from the undivided run")
    return 1 if wrong else 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--prompt", type=Path, default=HERE.parent / "README.md", help="text file (default: the README)"
    )
    parser.add_argument("--tokens", type=int, default=48, help="tokens to decode (default 48)")
    parser.add_argument("--transports", default="shm,tcp", help="comma list (default shm,tcp)")
    parser.add_argument("--ways", default="push,pull", help="comma list (default push,pull)")
    parser.add_argument("--repeat", type=int, default=5, help="timed transfers per line (default 5)")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds for each step (default 20)")
    parser.add_argument("--damage", action="store_true", help="damage the cache after it arrived: tokens must differ")
    args = parser.parse_args()
    args.prompt = args.prompt.resolve()
    if not args.prompt.is_file():
        parser.error(f"--prompt: {args.prompt} is not a file")
    if not 1 <= args.tokens <= 512 or not 1 <= args.repeat <= 1000:
        parser.error("--tokens must be 1 to 512 and --repeat 1 to 1000")
    return args


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    os.environ.update(ONE_THREAD)
    try:
        sys.exit(asyncio.run(run(parse())))
    except WorkerFailed as failed:
        sys.exit(f"\ndemo failed: {failed}")
