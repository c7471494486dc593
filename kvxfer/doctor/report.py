"""Findings as text for people and as JSON for tools."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from kvxfer.config import Loaded
from kvxfer.doctor.ascend import judge_ascend, probe_ascend
from kvxfer.doctor.facts import (
    Ascend,
    Finding,
    FindingGroup,
    FindingState,
    Host,
    Network,
    PeerSeen,
    Program,
    Transport,
    worst,
)
from kvxfer.doctor.host import judge_host, probe_host
from kvxfer.doctor.network import judge_network, judge_peer, probe_network, probe_peers
from kvxfer.doctor.program import judge_program, judge_transports, probe_program, probe_transports

_MARKS = {
    FindingState.OK: "ok",
    FindingState.WARNING: "warning",
    FindingState.PROBLEM: "PROBLEM",
    FindingState.NOT_HERE: "not here",
}
_MARK_CHARS = 9
_CHECK_CHARS_MAX = 28


def as_text(findings: Sequence[Finding], *, simulated: bool) -> str:
    """One line per finding, what to do below it, and a summary."""
    width = min(max((len(finding.check) for finding in findings), default=0), _CHECK_CHARS_MAX)
    lines = [SIMULATED, ""] if simulated else []
    for group, members in groupby(findings, key=lambda finding: finding.group):
        lines.append(group)
        for finding in members:
            lines.append(f"  {_MARKS[finding.state]:<{_MARK_CHARS}}{finding.check:<{width}}  {finding.found}")
            if finding.advice:
                lines.append(f"{'':{_MARK_CHARS + width + 4}}-> {finding.advice}")
        lines.append("")
    counts = Counter(finding.state for finding in findings)
    lines.append(", ".join(f"{counts[state]} {state.value}" for state in FindingState))
    if simulated:
        lines += ["", SIMULATED]
    return "\n".join(lines)


SIMULATED = "*** THE ACCELERATOR IS A SIMULATION: nothing here says anything about hardware ***"


def as_json(findings: Sequence[Finding], *, simulated: bool) -> str:
    """One object: the worst state, whether an accelerator is simulated, every finding."""
    rows = [{**asdict(finding), "state": finding.state.value} for finding in findings]
    return json.dumps({"state": worst(findings).value, "simulated": simulated, "findings": rows}, indent=2)


# -- the whole examination: probes first, then judgements, in the order in which a host is built up --------------------


_CONFIG = FindingGroup("configuration")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResults:
    """All that the probes found, for the judges."""

    program: Program
    transports: tuple[Transport, ...]
    host: Host
    network: Network
    ascend: Ascend
    peers: tuple[PeerSeen, ...] = ()


async def gather(loaded: Loaded, peers: Sequence[str], timeout_s: float) -> ProbeResults:
    """Look at everything; takes a second or two, longer where accelerators are."""
    program = probe_program()
    return ProbeResults(
        program=program,
        transports=() if program.native_error else probe_transports(loaded.config, loaded.origins),
        host=probe_host(),
        network=probe_network(loaded.config),
        ascend=probe_ascend(),
        peers=await probe_peers(peers, loaded.config, timeout_s) if peers else (),
    )


def judge(facts: ProbeResults, loaded: Loaded) -> Iterator[Finding]:
    """Every finding, grouped."""
    config = loaded.config
    yield from judge_program(facts.program)
    for warning in loaded.warnings:
        yield _CONFIG.warning("unknown", warning, "correct the name, or remove it")
    yield from judge_transports(facts.transports)
    host = list(judge_host(facts.host, config))
    yield from sorted(host, key=lambda finding: finding.group != "memory")  # stable: groups stay whole
    yield from judge_network(facts.network, config)
    yield from judge_ascend(facts.ascend, config)
    usable = tuple(transport.name for transport in facts.transports if transport.listed and not transport.error)
    for peer in facts.peers:
        yield from judge_peer(peer, facts.program, usable, own_accelerator(facts.ascend), facts.network)


def own_accelerator(ascend: Ascend) -> dict[str, object]:
    """In the form in which daemons tell each other; empty: none."""
    accelerator = ascend.accelerator
    if not accelerator.found:
        return dict(ascend.installed)
    loaded = {"soc": accelerator.soc, "toolkit": accelerator.toolkit, "simulated": accelerator.simulated}
    return {**ascend.installed, **loaded, **({"reported": accelerator.reported} if accelerator.reported else {})}
