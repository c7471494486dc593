"""Looking at this copy of kvxfer: versions, whether the engine loads, which transports open."""

from __future__ import annotations

import importlib.util
import platform
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

from kvxfer.config import TRANSPORTS, Config
from kvxfer.config.paths import make_scratch_dir
from kvxfer.doctor.facts import Finding, FindingGroup, Program, Transport
from kvxfer.errors import ConfigError, KvxferError
from kvxfer.server import package_version

PACKAGES = ("cffi", "msgpack", "numpy", "prometheus-client", "uvloop")
LOCAL = "loop"  # opens everywhere, so that an engine opens when nothing else does


def probe_program() -> Program:
    """What runs here: the versions, the interpreter, and whether the engine can be loaded."""
    spec = importlib.util.find_spec("kvxfer.native._shim")
    error = "it was not built for this interpreter" if spec is None else ""
    missing = ""
    if not error:
        try:
            missing = importlib.import_module("kvxfer.native.engine").encryption_missing()
        except Exception as failure:  # whatever it is, it is the finding
            error = f"{type(failure).__name__}: {failure}"
    major, minor, micro = sys.version_info[:3]
    return Program(
        version=package_version(),
        python=(major, minor, micro),
        implementation=platform.python_implementation(),
        machine=platform.machine(),
        native_path=str(spec.origin) if spec is not None else "",
        native_error=error,
        encryption_error=missing,
        packages={name: _version_of(name) for name in PACKAGES},
    )


def _version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def probe_transports(config: Config, origins: Mapping[str, str]) -> tuple[Transport, ...]:
    """Every transport that is not of one process alone, each in an engine of its own, opened for a moment."""
    from kvxfer.native.transports import names_of

    listed = {name.removeprefix("fault+") for name in names_of(config.transports)}
    chosen = origins.get("transports", "default") != "default"
    try:
        place = str(make_scratch_dir("kvxfer-doctor-"))
    except ConfigError as nowhere:
        why = f"not tried: {nowhere.message}"
        return tuple(
            Transport(name=name, error=why, listed=name in listed, wanted=chosen and name in listed)
            for name in TRANSPORTS
            if name != LOCAL
        )
    try:
        return tuple(
            replace(_opened(name, config, place), listed=name in listed, wanted=chosen and name in listed)
            for name in TRANSPORTS
            if name != LOCAL
        )
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _opened(name: str, config: Config, place: str) -> Transport:
    from kvxfer.native.engine import Engine, EngineConfig
    from kvxfer.native.types import MemoryKind

    asked = (LOCAL, f"?{name}")
    # Any port: those of the configuration may be held by the daemon that it is of.
    overrides = {"transports": asked, "socket_dir": place, "tcp_port": 0, "hixl_port": 0, "hixl_engine_port": 0}
    try:
        engine = Engine(EngineConfig.from_config(config, secrets.token_bytes(16), **overrides))
    except KvxferError as failure:
        return Transport(name=name, error=failure.message)
    try:
        here = {info.name: info for info in engine.transports}
        why = engine.unavailable.get(name, "it did not open")
    finally:
        engine.close()
    if name not in here:
        return Transport(name=name, error=why)
    kinds = [kind.name.lower() for kind in MemoryKind if here[name].moves(kind)]
    found = here[name]
    return Transport(name=name, memory=", ".join(kinds), endpoint=found.endpoint, encrypted=found.encrypted)


# -- judging this copy of kvxfer: interpreter, compiled engine, packages, transports -----------------------------------


PYTHON_MIN = (3, 11)
_GROUP = FindingGroup("kvxfer")
_TRANSPORTS = FindingGroup("transports")


def judge_program(program: Program) -> Iterator[Finding]:
    """Is this copy of kvxfer whole?"""
    version = ".".join(map(str, program.python))
    about = f"{program.implementation} {version} on {program.machine}"
    if program.python < PYTHON_MIN:
        yield _GROUP.problem("python", about, f"install Python {PYTHON_MIN[0]}.{PYTHON_MIN[1]} or newer")
    else:
        yield _GROUP.ok("python", about)
    if program.native_error:
        advice = "build it (`make build` in a checkout), or install kvxfer again with the interpreter that runs it"
        yield _GROUP.problem("native engine", f"does not load: {program.native_error}", advice)
    else:
        found = f"kvxfer {program.version}, protocol {program.protocol}, {program.native_path}"
        yield _GROUP.ok("native engine", found)
    absent = [name for name, found in program.packages.items() if not found]
    shown = ", ".join(f"{name} {found}" for name, found in program.packages.items() if found)
    if absent:
        yield _GROUP.problem("packages", f"missing: {', '.join(absent)}", f"pip install {' '.join(absent)}")
    elif shown:
        yield _GROUP.ok("packages", shown)
    if not program.native_error:
        yield _encryption(program)


def _encryption(program: Program) -> Finding:
    if program.encryption_error:
        return _GROUP.not_here("tcp_encryption", program.encryption_error)
    return _GROUP.ok("tcp_encryption", "possible: the system's libcrypto has what it takes")


def judge_transports(transports: Sequence[Transport]) -> Iterator[Finding]:
    """Which transports work here, and why others do not."""
    usable = [transport for transport in transports if transport.listed and not transport.error]
    for transport in transports:
        if not transport.error:
            detail = f"available{f' for {transport.memory}' if transport.memory else ''}"
            detail += ", encrypted" if transport.encrypted else ""
            more = "" if transport.listed else "; not in `transports`, so it is not used"
            yield _TRANSPORTS.ok(transport.name, detail + more)
        elif not transport.listed or (usable and not transport.wanted):
            yield _TRANSPORTS.not_here(transport.name, transport.error)
        elif usable:
            advice = f"repair what is named here, or take {transport.name} out of `transports`"
            yield _TRANSPORTS.warning(transport.name, transport.error, advice)
        else:
            advice = "no transport of `transports` works here: repair one of them, or add one that is available"
            yield _TRANSPORTS.problem(transport.name, transport.error, advice)
