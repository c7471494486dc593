"""Judging accelerators: driver, device files, network ports of the cards, toolkit, memory of the cards.

Several of these are known from their symptoms only on somebody's cluster; what is advised is what helped there. Nothing
here talks to HIXL's own port: sixteen idle connections freeze it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvxfer.addresses import is_wildcard
from kvxfer.config import Config
from kvxfer.doctor.facts import Accelerator, Ascend, Card, CardLink
from kvxfer.doctor.finding import Finding, Group, size, some
from kvxfer.doctor.hccn import families, parse
from kvxfer.memory.placement import HEADROOM

NIC_PORT = 16666  # where the port of a card listens, unless it is configured
SOURCE = "source set_env.sh of the toolkit before the process starts: LD_LIBRARY_PATH is read at the start only"
NO_LINK_LATCH = ("8.5",)
# RDMA settings that the library reads: name, lowest, highest, step.
NUMBERS = (
    ("HCCL_RDMA_TC", 0, 255, 4),
    ("HCCL_RDMA_SL", 0, 7, 1),
    ("HCCL_RDMA_TIMEOUT", 5, 24, 1),
    ("HCCL_RDMA_RETRY_CNT", 1, 7, 1),
    ("HCCL_INTRA_ROCE_ENABLE", 0, 1, 1),
)
RDMA_TIMEOUT, RDMA_RETRIES = 20, 7  # what holds when nothing is set
RDMA_UNIT_S = 4.096e-6
_GROUP = Group("ascend")


def judge_ascend(ascend: Ascend, config: Config) -> Iterator[Finding]:
    """Everything about accelerators; a single line where there is no sign of any."""
    accelerator = ascend.accelerator
    if accelerator.simulated:
        found = f"{accelerator.soc}: SIMULATED, there is no card; no figure from here is a figure of hardware"
        yield _GROUP.warning("SIMULATION", found, "unset KVXFER_CANN_LIBDIR to use the real libraries")
    if not ascend.devices and not accelerator.found:
        yield _GROUP.not_here("libraries", _nothing(ascend))
        return
    if not accelerator.simulated:
        yield from _driver(ascend)
        yield from _environment(ascend)
    yield from _libraries(ascend)
    yield from _cards(ascend)
    if not accelerator.simulated:
        yield from judge_hccn(ascend)
        yield from _links(ascend.links)
    yield from _name(config)
    yield from _sharing(ascend)
    yield from judge_settings(ascend.environment, config)


def _nothing(ascend: Ascend) -> str:
    why = ascend.accelerator.why
    if why:
        return why
    return f"no accelerator libraries; looked in {some(name for name, _ in ascend.directories)}"


def _driver(ascend: Ascend) -> Iterator[Finding]:
    devices = some(f"davinci{device}" for device in ascend.devices)
    version = f", driver {ascend.driver}" if ascend.driver else ""
    if not ascend.devices:
        advice = "load the driver (`npu-smi info`), or pass /dev/davinci0 and the others into the container"
        yield _GROUP.problem("devices", f"libraries are here, but no /dev/davinci*{version}", advice)
        return
    if ascend.missing:
        advice = (
            "pass it into the container: --device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc"
        )
        yield _GROUP.problem("devices", f"{devices}{version}; missing: {some(ascend.missing)}", advice)
    elif ascend.denied:
        advice = "add this user to the group that owns them (HwHiAiUser), also inside the container"
        yield _GROUP.problem("devices", f"{devices}{version}; may not be opened: {some(ascend.denied)}", advice)
    else:
        yield _GROUP.ok("devices", f"{devices}{version}")


def _environment(ascend: Ascend) -> Iterator[Finding]:
    home = ascend.environment.get("ASCEND_HOME_PATH", "")
    paths = [path for path in ascend.environment.get("LD_LIBRARY_PATH", "").split(":") if path]
    here = dict(ascend.directories)
    if not home:
        yield _GROUP.warning("toolkit environment", "ASCEND_HOME_PATH is not set", SOURCE)
    elif not any(found for name, found in here.items() if name.startswith(home)):
        advice = f"install the toolkit there, or repair the variable; {SOURCE}"
        yield _GROUP.problem("toolkit environment", f"ASCEND_HOME_PATH is {home}, which holds no libraries", advice)
    elif not any(path.startswith(home) for path in paths):
        yield _GROUP.warning("toolkit environment", f"LD_LIBRARY_PATH names nothing below {home}", SOURCE)
    else:
        yield _GROUP.ok("toolkit environment", f"ASCEND_HOME_PATH is {home}")
    if ascend.devices and not any("driver" in path for path in paths):
        found = "LD_LIBRARY_PATH does not name the driver's libraries (/usr/local/Ascend/driver/lib64/...)"
        yield _GROUP.warning("driver libraries", found, SOURCE)


def _libraries(ascend: Ascend) -> Iterator[Finding]:
    accelerator = ascend.accelerator
    if not accelerator.found:
        advice = f"install the toolkit (CANN 8.5 or newer); {SOURCE}"
        yield _GROUP.problem("libraries", accelerator.why or _nothing(ascend), advice)
        return
    yield _GROUP.ok("libraries", f"{accelerator.soc}: {_places(accelerator.paths)}")
    reported = f" (says {accelerator.reported})" if accelerator.reported else ""
    found = f"{accelerator.toolkit}{reported}"
    lacks = f"; lacks {some(accelerator.lacks)}" if accelerator.lacks else ""
    if accelerator.toolkit in NO_LINK_LATCH:
        advice = "9.0 or newer notices broken links sooner; all nodes must have the same version"
        yield _GROUP.warning("toolkit", found + lacks, advice)
    else:
        yield _GROUP.ok("toolkit", found + lacks)


def _places(paths: tuple[str, ...]) -> str:
    """The files; their directory once when it is the same."""
    folders = {path.rpartition("/")[0] for path in paths}
    if len(folders) != 1:
        return some(paths)
    return f"{some(path.rpartition('/')[2] for path in paths)} in {folders.pop()}"


def _cards(ascend: Ascend) -> Iterator[Finding]:
    accelerator: Accelerator = ascend.accelerator
    name = " (simulated)" if accelerator.simulated else ""
    if accelerator.found and not accelerator.cards:
        visible = ascend.environment.get("ASCEND_RT_VISIBLE_DEVICES")
        why = f"; ASCEND_RT_VISIBLE_DEVICES is {visible}" if visible is not None else ""
        yield _GROUP.problem("cards", f"the library sees no device{why}", "compare with `npu-smi info`")
    for card in accelerator.cards:
        yield _card(card, name)


def _card(card: Card, name: str) -> Finding:
    check = f"card {card.device}{name}"
    if card.error:
        advice = "`npu-smi info -t health`; another process may hold it, or it needs a reset"
        return _GROUP.problem(check, card.error, advice)
    found = f"{size(card.free)} of {size(card.total)} free"
    if not card.healthy:
        return _GROUP.problem(check, f"reports an abnormal state; {found}", "`npu-smi info -t health`, then reset it")
    if card.free < card.total * HEADROOM:
        advice = (
            f"registration needs contiguous memory: leave {HEADROOM:.0%} free (gpu_memory_utilization of the"
            ' engine), or allow spill = "dram"'
        )
        return _GROUP.warning(check, found, advice)
    return _GROUP.ok(check, found)


def judge_hccn(ascend: Ascend) -> Iterator[Finding]:
    """The cards' own addresses."""
    if ascend.hccn is None:
        found = f"{ascend.hccn_path} is not here: the cards' addresses are unknown"
        advice = (
            "mount it into the container (with hccn_tool of the driver); without it links between cards over RoCE"
            " cannot be made, inside a supernode it may be absent"
        )
        yield _GROUP.warning("hccn.conf", found, advice)
        return
    settings = parse(ascend.hccn)
    absent = [device for device in ascend.devices if device not in settings.ports]
    kinds = families(tuple(settings.ports.values()))
    if settings.wrong:
        advice = "hccn_tool -i N -ip -s address A netmask M writes it; each card has one address of its own"
        yield _GROUP.problem("hccn.conf", some(settings.wrong), advice)
    elif absent:
        advice = "hccn_tool -i N -ip -s address A netmask M for each"
        yield _GROUP.warning("hccn.conf", f"no address for {some(f'card {device}' for device in absent)}", advice)
    elif len(kinds) > 1:
        yield _GROUP.warning("hccn.conf", "some cards have IPv4 and some IPv6 addresses", "use one family on all cards")
    else:
        shown = some(f"{port.device}={port.address}" for port in settings.ports.values())
        yield _GROUP.ok("hccn.conf", shown or "no card has an address of its own")


def _links(links: tuple[CardLink, ...]) -> Iterator[Finding]:
    for link in links:
        check = f"link of card {link.device}"
        said = ", ".join(
            f"{what} {text}" for what, text in (("link", link.link), ("health", link.health), ("tls", link.tls)) if text
        )
        if link.error:
            advice = "run hccn_tool by hand; it needs root, and the driver's directory in a container"
            yield _GROUP.warning(check, link.error, advice)
        elif link.link == "UP":
            yield _GROUP.ok(check, said)
        else:
            advice = (
                "check the cable and the switch port, then try `hccn_tool -i N -ping -g address PEER`: some supernodes"
                " report DOWN although packets pass (there: -hccs_ping)"
            )
            yield _GROUP.warning(check, said or "hccn_tool says nothing that is known here", advice)
    switches = {link.tls: link.device for link in links if link.tls}
    if len(switches) > 1:
        shown = ", ".join(f"card {device} {tls}" for tls, device in switches.items())
        advice = "hccn_tool -i N -tls -s enable 0 (or 1): the same on every card of every node, or links fail"
        yield _GROUP.problem("tls of the cards", f"not the same everywhere: {shown}", advice)


def _name(config: Config) -> Iterator[Finding]:
    name = config.hixl_bind_host
    if is_wildcard(name):
        found = f"hixl would call its engine {name}, which no peer can dial, so it does not open"
        yield _GROUP.warning("address", found, "set data_bind to an address, or let data_advertise name one first")


def _sharing(ascend: Ascend) -> Iterator[Finding]:
    for device, pids in ascend.holders.items():
        if len(pids) > 1:
            found = f"{len(pids)} processes hold it open ({some(pids)})"
            advice = (
                f"if more than one of them makes links, give each its own comm_resource_config.listen_port: port"
                f" {NIC_PORT} of a card belongs to one process"
            )
            yield _GROUP.warning(f"card {device} shared", found, advice)
    if ascend.nic_port_taken:
        advice = "only if hixl runs over a NIC of the host: give one of the two another listen_port"
        yield _GROUP.warning("port 16666", f"a process of this host listens on port {NIC_PORT}", advice)


def judge_settings(environment: Mapping[str, str], config: Config) -> Iterator[Finding]:
    """The variables that the libraries read for RDMA."""
    wrong: list[str] = []
    given: dict[str, int] = {}
    for name, low, high, step in NUMBERS:
        text = environment.get(name)
        if text is None:
            continue
        if not text.isdecimal() or not low <= int(text) <= high or int(text) % step:
            every = f" in steps of {step}" if step > 1 else ""
            wrong.append(f"{name}={text} is not {low} to {high}{every}")
        else:
            given[name] = int(text)
    if wrong:
        yield _GROUP.problem("rdma settings", some(wrong), "repair it, the same on all nodes")
        return
    window = rdma_window_s(given)
    shown = ", ".join(f"{name}={value}" for name, value in given.items()) or "defaults"
    found = f"{shown}; a lost RDMA packet is retried for up to {window:.1f} s"
    if given and window > config.timeout_s:
        advice = (
            f"a transfer may end at timeout_s ({config.timeout_s:g} s) before RDMA gives up: raise it, or lower these"
        )
        yield _GROUP.warning("rdma settings", found, advice)
    else:
        yield _GROUP.ok("rdma settings", found)


def rdma_window_s(given: Mapping[str, int]) -> float:
    """How long the NIC tries: 4.096 us times two to the power of the timeout, for each retry."""
    exponent = given.get("HCCL_RDMA_TIMEOUT", RDMA_TIMEOUT)
    return float(RDMA_UNIT_S * 2**exponent * given.get("HCCL_RDMA_RETRY_CNT", RDMA_RETRIES))
