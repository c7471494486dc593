"""Judging this copy of kvxfer: interpreter, compiled engine, packages, transports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvxfer.doctor.facts import Program, Transport
from kvxfer.doctor.finding import Finding, Group

PYTHON_MIN = (3, 11)
_GROUP = Group("kvxfer")
_TRANSPORTS = Group("transports")


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
