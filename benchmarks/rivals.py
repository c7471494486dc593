"""Other data movers on our workloads: which of them can run here, and one round of one of them as rows.

Each is a plain script in ``benchmarks/peers`` that runs in an environment of its own (``make bench-peers`` makes
them), so nothing of a rival is ever imported here. A script is started for one workload, in a process group of its own,
gets the sizes of the run, and writes its result into a file, which is read with the suspicion that any foreign output
deserves. At the end of its time, or when the caller is cancelled, the whole group is killed.

`docs/benchmarks.md` says how to add one.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kvxfer.bench.rows import QUANTITIES, Row, RunOptions, quantity_of, single
from kvxfer.bench.work import SIZES
from kvxfer.errors import IntegrityError, KvxferError, ProtocolError, TransferTimeout, TransportError, UsageError

MISMATCH = 3  # exit code of a script whose receiver found other bytes
RESULT_BYTES_MAX = 1 << 20
COMPLAINT_BYTES_MAX = 4096
REPEATS_MIN = 4  # a process that was just started needs more of them than ours
INSTALL = "run `make bench-peers`"
DIRECTIONS = {"write": "put", "read": "get"}
SCRIPTS_FOR = {
    "W1": "w1",
    "W2": "w2",
    "W5": "w2",
    "W2u": "w2",
    "W3": "w3",
    "W3u": "w3",
    "W3b": "w3b",
    "W4": "w4",
    "W6": "w6",
    "setup": "setup",
    "idle": "setup",
}
"""The memory of rivals is always the user's, so W2u and W3u are their W2 and W3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run a script: ``labels`` (read or write → the peer's name in rows)."""

    name: str
    transport: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A script, the environment that it runs in, programs that must be on the PATH, and the workloads that it has."""

    environment: str
    variants: tuple[Variant, ...]
    script: str = ""
    programs: tuple[str, ...] = ()
    workloads: tuple[str, ...] = tuple(SCRIPTS_FOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where scripts and environments are: the checkout, unless ``KVXFER_BENCH_PEERS`` names another folder for the
    environments.
    """

    scripts: Path = field(default_factory=lambda: _root() / "benchmarks" / "peers")
    environments: Path = field(
        default_factory=lambda: Path(os.environ.get("KVXFER_BENCH_PEERS") or _root() / ".bench-peers")
    )


def _root() -> Path:
    return Path(__file__).resolve().parent.parent


def _writes(name: str, transport: str, label: str) -> Variant:
    return Variant(name=name, transport=transport, labels={"write": label})


def _both(name: str, transport: str, read: str, write: str) -> Variant:
    return Variant(name=name, transport=transport, labels={"read": read, "write": write})


RIVALS: dict[str, Rival] = {
    "nixl": Rival(
        environment="nixl",
        variants=(
            _both("default", "shm", "NIXL default(cma) READ", "NIXL default(cma) WRITE"),
            _both("tcp", "tcp", "NIXL tcp READ", "NIXL tcp WRITE"),
        ),
    ),
    "mooncake": Rival(
        environment="mooncake", variants=(_both("tcp", "tcp", "Mooncake tcp read", "Mooncake tcp write"),)
    ),
    "ucx": Rival(
        environment="ucx",
        variants=(
            _both("cma", "shm", "UCX C cma get", "UCX C cma put"),
            _writes("shm", "shm", "UCX C shm put"),
            _both("tcp", "tcp", "UCX C tcp get", "UCX C tcp put"),
        ),
    ),
    "ucxx": Rival(
        environment="ucx",
        script="ucxx",
        variants=(
            _writes("sm-polling", "shm", "ucxx asyncio shm/cma"),
            _writes("tcp-polling", "tcp", "ucxx asyncio tcp"),
        ),
    ),
    "grpc": Rival(environment="grpc", variants=(_writes("default", "tcp", "gRPC bidi stream"),)),
    "redis": Rival(
        environment="redis", variants=(_writes("default", "tcp", "Redis SET+GET"),), programs=("redis-server",)
    ),
    "memcached": Rival(
        environment="memcached", variants=(_writes("default", "tcp", "Memcached set+get"),), programs=("memcached",)
    ),
    "zmq": Rival(environment="zmq", variants=(_writes("default", "tcp", "pyzmq PUSH/PULL"),)),
    "asyncio": Rival(
        environment="tcp",
        script="asyncio",
        variants=(
            _writes("streams", "tcp", "asyncio streams"),
            _writes("sock", "tcp", "asyncio sock_recv_into"),
            _writes("uvloop-streams", "tcp", "uvloop streams"),
            _writes("uvloop-protocol", "tcp", "uvloop BufferedProtocol"),
        ),
    ),
    "tcp": Rival(
        environment="tcp",
        variants=(_writes("host", "tcp", "py socket"), _writes("reno", "tcp", "py socket, reno")),
    ),
    "iperf3": Rival(
        environment="tcp",
        script="iperf3",
        variants=(_writes("host", "tcp", "iperf3"), _writes("reno", "tcp", "iperf3, reno")),
        programs=("iperf3",),
        workloads=("W2", "W5", "W6"),
    ),
}
# -- what is there ----------------------------------------------------------------------------------------------------


def available(places: Places | None = None) -> dict[str, str | None]:
    """Every rival: None when it can run here, else why not and what to do. Starts nothing."""
    found = places or Places()
    return {name: missing(name, found) for name in RIVALS}


def missing(name: str, places: Places) -> str | None:
    """Why this one cannot run."""
    rival = RIVALS[name]
    if not (places.scripts / _script(name)).is_file():
        return "its script is not part of this installation: run from a checkout that has benchmarks/peers"
    for program in rival.programs:
        if shutil.which(program) is None:
            return f"{program} is not on the PATH: install it (Debian: apt-get install {program})"
    stamp = places.environments / f"{rival.environment}.json"
    wanted = places.scripts / "requirements" / f"{rival.environment}.txt"
    try:
        made = json.loads(stamp.read_text(encoding="utf-8")[:RESULT_BYTES_MAX])
        pinned = wanted.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return f"not installed: {INSTALL}"
    if not isinstance(made, dict) or made.get("requirements") != pinned:
        return f"installed in other versions than those pinned: {INSTALL}"
    reason = made.get("error")
    if reason is not None:
        return f"could not be installed: {str(reason)[:400]}"
    if not _python(rival, places).is_file():
        return f"its environment is gone: {INSTALL}"
    return None


def _script(name: str) -> str:
    return f"{RIVALS[name].script or name}_peer.py"


def _python(rival: Rival, places: Places) -> Path:
    return places.environments / rival.environment / "bin" / "python"


# -- measuring --------------------------------------------------------------------------------------------------------


def run(name: str, workload: str, options: RunOptions | None = None, places: Places | None = None) -> list[Row]:
    """One round of a rival on a workload, every variant on the transports asked for; rows with ``n`` 1.

    A workload that it does not have gives no rows; W2 also gives W5, and "setup" also "idle". Raises `UsageError`
    (unknown, or not available), `IntegrityError` (the receiver found other bytes), `TransferTimeout` (not done in
    ``options.timeout_s``), `ProtocolError` (output that makes no sense), `TransportError` (the script failed).
    """
    return asyncio.run(measure(name, workload, options, places))


async def measure(
    name: str, workload: str, options: RunOptions | None = None, places: Places | None = None
) -> list[Row]:
    """`run` inside an event loop; when it is cancelled the rival's processes are gone."""
    options, places = options or RunOptions(), places or Places()
    rival = RIVALS.get(name)
    if rival is None:
        raise UsageError("unknown rival", value=name[:80], hint="one of " + ", ".join(RIVALS))
    if workload not in rival.workloads:
        return []
    reason = missing(name, places)
    if reason is not None:
        raise UsageError(f"{name} cannot run here: {reason}", peer=name)
    end = time.monotonic() + options.timeout_s
    rows = []
    for variant in rival.variants:
        if variant.transport in options.transports:
            left = replace(options, timeout_s=max(end - time.monotonic(), 0.001))
            rows += await _one(name, variant, workload, left, places)
    return rows


async def _one(name: str, variant: Variant, workload: str, options: RunOptions, places: Places) -> list[Row]:
    """One process of a script."""
    sizes = asdict(SIZES["quick" if options.quick else "full"])
    sizes["repeats"] = max(sizes["repeats"], REPEATS_MIN)
    with tempfile.TemporaryDirectory(prefix="kvxfer-rival-") as folder:
        result, complaints = Path(folder) / "result.json", Path(folder) / "stderr"
        command = [str(_python(RIVALS[name], places)), str(places.scripts / _script(name))]
        command += ["--workload", SCRIPTS_FOR[workload], "--variant", variant.name, "--op", ",".join(variant.labels)]
        command += ["--sizes", json.dumps(sizes), "--json", str(result)]
        what = f"{name} ({variant.name}) on {workload}"
        status = await _execute(command, complaints, options.timeout_s, what)
        if status == MISMATCH:
            raise IntegrityError(f"{what}: the receiver found other bytes than were sent", peer=name)
        if status != 0:
            said = _last_line(complaints)
            raise TransportError(f"{what} ended with status {status}: {said or 'it said nothing'}", peer=name)
        return parse(_read(result, what), name, variant, workload)


async def _execute(command: list[str], complaints: Path, limit_s: float, what: str) -> int:
    """The exit status; nothing of the process group is left in any case."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "PYTHONWARNINGS", "PYTHONSTARTUP", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    with complaints.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=stderr,
            env=environment,
            start_new_session=True,
        )
    try:
        async with asyncio.timeout(limit_s):
            return await process.wait()
    except TimeoutError:
        raise TransferTimeout(f"{what} was not done in {limit_s:.0f} s and was stopped") from None
    finally:
        _kill_group(process.pid)
        await asyncio.shield(process.wait())


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # the usual case: all of them ended


def _last_line(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - COMPLAINT_BYTES_MAX))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:400] if lines else ""


def _read(path: Path, what: str) -> str:
    try:
        with path.open("rb") as file:
            return file.read(RESULT_BYTES_MAX).decode(errors="replace")
    except OSError as wrong:
        raise ProtocolError(f"{what} left no result: {wrong}") from wrong


# -- reading ----------------------------------------------------------------------------------------------------------


def parse(text: str, name: str, variant: Variant, workload: str) -> list[Row]:
    """The rows in a script's result: ``{"verified": N, "results": {"write": {"GBps": 1.5, ...}}}``.

    Raises `IntegrityError` when nothing was verified, `ProtocolError` for anything else than such an object.
    """
    try:
        found = json.loads(text)
        results: dict[str, dict[str, Any]] = found["results"]
        verified = found["verified"]
        items = [(op, metric, value) for op, values in results.items() for metric, value in values.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as wrong:
        raise ProtocolError(f"{name}: the result is no result: {wrong!r}", peer=name) from None
    if isinstance(verified, bool) or not isinstance(verified, int) or verified < 1:
        raise IntegrityError(f"{name}: no receiver verified anything", peer=name)
    rows = []
    for op, metric, value in items:
        if op not in variant.labels:
            raise ProtocolError(f"{name}: a result for {op[:40]!r}, which was not asked for", peer=name)
        number = _number(name, metric, value)
        place = _place(workload, op, metric)
        if place is not None:
            rows.append(single(variant.labels[op], variant.transport, *place, number))
    if not rows:
        raise ProtocolError(f"{name}: the result has no number", peer=name)
    return rows


def _number(name: str, metric: str, value: object) -> float:
    try:
        quantity_of(metric)
    except KvxferError as wrong:
        raise ProtocolError(f"{name}: {wrong}", peer=name) from None
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    if not good:
        raise ProtocolError(f"{name}: {metric} is {str(value)[:40]!r}, no number", peer=name)
    return float(value)  # type: ignore[arg-type]


def _place(workload: str, op: str, metric: str) -> tuple[str, str] | None:
    """Workload and metric of a number in our rows; None for what we do not report there."""
    if SCRIPTS_FOR[workload] == "setup":
        return ("idle", metric) if metric == "cores" else ("setup", metric)
    directed = f"{DIRECTIONS[op]}_{metric}"
    if metric in QUANTITIES and metric == "cpu_s_per_GiB":
        return ("W5", directed) if workload in ("W2", "W5") else None
    return (workload, directed) if workload != "W5" else None
