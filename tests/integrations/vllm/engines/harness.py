"""Nodes and engines of the real runs, as processes of their own that end with the test, and what is asked of them."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
NOISE = re.compile(
    r"base\.py|cpu_worker|_utils\.py|factory\.py|Loading|parallel_state|compilation|core\.py:133|^ *$|deprecated"
)
UP_S = 150.0  # an engine starts in 10 s on a quiet machine
ANSWER_S = 60.0
MODEL_S = 120.0


def vllm_python() -> str:
    """The interpreter of `make vllm-env`; empty where `make test-vllm` did not start this run."""
    return os.environ.get("TEST_VLLM_PYTHON", "")


class Process:
    """A child in a session of its own, with its output in a file; it is killed with all its children in the end."""

    def __init__(self, name: str, command: Sequence[str], log: Path, **how: Any) -> None:
        self.name = name
        self.log = log
        self._reader: threading.Thread | None = None
        with log.open("ab") as file:
            how.setdefault("stdout", file)
            self.child = subprocess.Popen(command, stderr=file, start_new_session=True, **how)

    @property
    def alive(self) -> bool:
        return self.child.poll() is None

    def kill(self) -> None:
        if self.alive:
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait(20)
        if self._reader is not None:
            self._reader.join(20)
        for pipe in (self.child.stdin, self.child.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def tail(self, lines: int = 20) -> str:
        """The end of what it printed, without what every engine prints."""
        told = [line for line in self.log.read_text(errors="replace").splitlines() if not NOISE.search(line)]
        return "\n".join(line[:300] for line in told[-lines:])


class Node:
    """One daemon, on loopback, with a socket directory of its own."""

    def __init__(self, name: str, place: Path, options: Sequence[str] = ()) -> None:
        self.name = name
        self.directory = place / name
        self.directory.mkdir(mode=0o700, exist_ok=True)
        self.options = options
        self.port = free_port()
        self.process: Process | None = None
        self.start()

    @property
    def socket(self) -> str:
        return str(self.directory / "kvxferd.sock")

    def start(self) -> None:
        command = [sys.executable, "-m", "kvxfer", "serve", "--socket-dir", str(self.directory)]
        command += [
            "--listen",
            f"127.0.0.1:{self.port}",
            "--http",
            "127.0.0.1:0",
            "--node-name",
            f"node-{self.name}",
            *self.options,
        ]
        self.process = Process(f"daemon {self.name}", command, self.directory / "log", cwd=ROOT)
        until(
            lambda: Path(self.socket).exists() or not self.process.alive, 30, f"the daemon of node {self.name} serves"
        )
        assert self.process.alive, self.process.tail()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        Path(self.socket).unlink(missing_ok=True)


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def until(condition: Callable[[], Any], limit: float, what: str, end_of: Process | None = None) -> Any:
    """Wait for a condition; what it gave."""
    end = time.monotonic() + limit
    while not (found := condition()):
        if time.monotonic() > end:
            told = end_of.tail() if end_of is not None else ""
            raise AssertionError(f"not within {limit:g} s: {what}\n{told}")
        time.sleep(0.01)
    return found


class EngineProcess(Process):
    """One vLLM engine (`engine.py`). Finished requests are kept in ``finished`` by id."""

    def __init__(self, name: str, settings: dict[str, Any], log: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": settings.pop("pythonpath", ""), "PYTHONHASHSEED": "0"}
        super().__init__(
            name,
            [vllm_python(), str(HERE / "engine.py")],
            log,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._numbers = itertools.count(1)
        self._answers: Queue[dict[str, Any]] = Queue()
        self.up: dict[str, Any] = {}
        self.finished: dict[str, dict[str, Any]] = {}
        self._write(json.dumps(settings))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _write(self, line: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(line.encode() + b"\n")
        self.child.stdin.flush()

    def _read(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            event = json.loads(line)
            match event.pop("what"):
                case "up":
                    self.up = event
                case "finished":
                    self.finished[event.pop("id")] = event
                case _:
                    self._answers.put(event)

    def ready(self) -> EngineProcess:
        until(lambda: self.up or not self.alive, UP_S, f"{self.name} is up", self)
        assert self.alive, f"{self.name} died at start:\n{self.tail()}"
        return self

    def ask(self, do: str, **how: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._write(json.dumps({"number": number, "do": do, **how}))
        end = time.monotonic() + ANSWER_S
        while True:
            try:
                answer = self._answers.get(timeout=0.1)
            except Empty:
                assert self.alive, f"{self.name} died at {do}:\n{self.tail()}"
                assert time.monotonic() < end, f"{self.name} did not answer {do}:\n{self.tail()}"
                continue
            assert answer["number"] == number
            return answer

    def add(self, id: str, prompt: list[int], tokens: int, params: dict[str, Any] | None = None) -> None:
        self.ask("add", id=id, prompt=prompt, tokens=tokens, params=params)

    def result(self, id: str, limit: float = ANSWER_S) -> dict[str, Any]:
        until(lambda: id in self.finished or not self.alive, limit, f"{self.name} finishes {id}", self)
        assert self.alive, f"{self.name} died at {id}:\n{self.tail()}"
        return self.finished.pop(id)

    def run(self, prompts: Sequence[list[int]], tokens: int, params: Sequence[Any] | None = None) -> list[Any]:
        """Generate for all of them at once; the results in order."""
        ids = [f"{self.name}-{next(self._numbers)}" for _ in prompts]
        for index, (id, prompt) in enumerate(zip(ids, prompts, strict=True)):
            self.add(id, prompt, tokens, params[index] if params is not None else None)
        return [self.result(id) for id in ids]

    def metrics(self) -> dict[str, float]:
        return dict(self.ask("metrics")["metrics"])

    def no_block_is_held(self, limit: float = 1.0) -> None:
        found: dict[str, Any] = {}

        def free() -> bool:
            found.update(self.ask("blocks"))
            return bool(found["free"] == found["start"])

        slack = float(os.environ.get("KVXFER_TEST_SLACK", "1"))
        try:
            until(free, limit * slack, f"{self.name} has all its blocks back")
        except AssertionError as late:
            raise AssertionError(f"{late}: {found} {self.ask('states')}\n{self.tail()}") from None


@dataclass(kw_only=True)
class Pair:
    """Two nodes, a prefill engine on one and a decode engine on the other; the latter is also the undivided engine."""

    prefill: EngineProcess
    decode: EngineProcess
    nodes: dict[str, Node]
    references: dict[tuple[Any, ...], list[list[int]]] = field(default_factory=dict)
    mode: str = "pull"
    exact: bool = True

    def reference(self, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
        """What the decode engine says alone, without any transfer."""
        key = (tokens, *map(tuple, prompts))
        if key not in self.references:
            self.references[key] = [one["tokens"] for one in self.decode.run(prompts, tokens)]
        return self.references[key]

    def streamed(self, prompts: Sequence[list[int]], tokens: int) -> list[dict[str, Any]]:
        """Both engines get the prompts at once, as from a router that knows where decode is."""
        number = next(_meetings)
        names = [f"meeting-{number}-{index}" for index in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self.decode.add(name, prompt, tokens, {"do_remote_prefill": True, "transfer_id": name})
        where = [f"127.0.0.1:{self.nodes['d'].port}"]
        for name, prompt in zip(names, prompts, strict=True):
            self.prefill.add(name, prompt, 1, {**PREFILL, "transfer_id": name, "remote_node": where})
        for name in names:
            self.prefill.result(name)
        return [self.decode.result(name) for name in names]

    def nothing_is_held(self) -> None:
        """Neither engine keeps a block of a request that is over."""
        for engine in (self.prefill, self.decode):
            if engine.alive:
                engine.no_block_is_held()

    def prefilled(self, prompts: Sequence[list[int]], **more: Any) -> list[dict[str, Any]]:
        """The prompts are computed by the prefill engine: what a router carries to the decode engine."""
        asked = [{**PREFILL, **more} for _ in prompts]
        return [one["params"] for one in self.prefill.run(prompts, 1, asked)]


# What vLLM's example proxy sends with a request to the prefill engine.
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


_meetings = itertools.count(1)


def prompts(count: int, *, seed: int = 1, least: int = 60, most: int = 400) -> list[list[int]]:
    """Prompts of different lengths; no two begin alike, so that nothing is found in a prefix cache."""
    rng = random.Random(seed)
    return [[rng.randrange(4, 260) for _ in range(rng.randrange(least, most))] for _ in range(count)]


def model(name: str) -> str:
    """The directory of a tiny model, made once for each run of the tests."""
    place = Path(tempfile.gettempdir()) / f"kvxfer-vllm-models-{os.getuid()}" / name
    if not (place / "tokenizer_config.json").exists():
        place.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        command = [vllm_python(), str(HERE / "models.py"), name, str(place)]
        subprocess.run(command, env=environment, check=True, timeout=MODEL_S, capture_output=True)
    return str(place)


def settings(name: str, role: str, core: int, socket: str, **changes: Any) -> dict[str, Any]:
    """Arguments of `engine.py`: a small engine on one core."""
    extra = {"socket": socket, **changes.pop("extra", {})}
    transfer = {
        "kv_connector": "KvxferConnector",
        "kv_connector_module_path": "kvxfer.integrations.vllm",
        "kv_role": role,
        "kv_load_failure_policy": changes.pop("policy", "recompute"),
        "kv_connector_extra_config": extra,
    }
    environment = {"VLLM_CPU_OMP_THREADS_BIND": str(core), **changes.pop("environment", {})}
    return {
        "model": model(name),
        "dtype": "bfloat16" if name == "qwen" else "float32",
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "block_size": 32,
        "enable_prefix_caching": False,
        "transfer": transfer,
        "environment": environment,
        **changes,
    }


@contextmanager
def pair(
    place: Path,
    name: str = "llama",
    *,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    daemon: Sequence[str] = (),
    **both: Any,
) -> Iterator[Pair]:
    """A `Pair` that is up; ``prefill`` and ``decode`` are changes of `settings` for one side, ``both`` for both."""
    with ExitStack() as stack:
        nodes = {side: Node(side, place, daemon) for side in ("p", "d")}
        for node in nodes.values():
            stack.callback(lambda node=node: node.process.kill())
        made = []
        for core, (side, role, changes) in enumerate((("p", "kv_producer", prefill), ("d", "kv_consumer", decode))):
            how = settings(name, role, core, nodes[side].socket, **merged(both, changes or {}))
            made.append(EngineProcess(f"{role[3:]}", how, place / f"{side}.log"))
            stack.callback(made[-1].kill)
        for one in made:
            one.ready()
        yield Pair(prefill=made[0], decode=made[1], nodes=nodes)


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    extra = {**first.get("extra", {}), **second.get("extra", {})}
    return {**first, **second, "extra": extra}
