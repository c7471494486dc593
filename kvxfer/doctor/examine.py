"""The whole examination: probes first, then judgements, in the order in which a host is built up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvxfer.config import Loaded
from kvxfer.doctor.facts import Ascend, Host, Network, PeerSeen, Program, Transport
from kvxfer.doctor.finding import Finding, Group
from kvxfer.doctor.judge_ascend import judge_ascend
from kvxfer.doctor.judge_host import judge_host
from kvxfer.doctor.judge_network import judge_network, judge_peer
from kvxfer.doctor.judge_program import judge_program, judge_transports
from kvxfer.doctor.probe_ascend import probe_ascend
from kvxfer.doctor.probe_host import probe_host
from kvxfer.doctor.probe_network import probe_network
from kvxfer.doctor.probe_peers import probe_peers
from kvxfer.doctor.probe_program import probe_program, probe_transports

_CONFIG = Group("configuration")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that was seen."""

    program: Program
    transports: tuple[Transport, ...]
    host: Host
    network: Network
    ascend: Ascend
    peers: tuple[PeerSeen, ...] = ()


async def gather(loaded: Loaded, peers: Sequence[str], timeout_s: float) -> Facts:
    """Look at everything; takes a second or two, longer where accelerators are."""
    program = probe_program()
    return Facts(
        program=program,
        transports=() if program.native_error else probe_transports(loaded.config, loaded.origins),
        host=probe_host(),
        network=probe_network(loaded.config),
        ascend=probe_ascend(),
        peers=await probe_peers(peers, loaded.config, timeout_s) if peers else (),
    )


def judge(facts: Facts, loaded: Loaded) -> Iterator[Finding]:
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
