"""Looking at accelerators: driver and toolkit in the file system, hccn_tool, and the libraries in a process apart.

The libraries are the vendor's: they may take long, write to standard output, crash, or keep the process alive. A child
with a time limit asks them (`kvxfer.doctor.accelerator`), so that the doctor survives its patient. Where there is no
sign of an accelerator, no child is started.
"""

from __future__ import annotations

import ipaddress
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvxfer.addresses import is_wildcard
from kvxfer.config import Config
from kvxfer.doctor.facts import Accelerator, Ascend, Card, CardLink, Finding, FindingGroup, size, some
from kvxfer.doctor.host import Tree
from kvxfer.memory.allocation import HEADROOM
from kvxfer.native.installed import installed

# -- /etc/hccn.conf: the addresses of the cards' own network ports, `key_N=value` per line -----------------------------
# Only what matters for reaching other cards is looked at; other keys are of no concern here.


_LINE = re.compile(r"([A-Za-z][A-Za-z0-9_]*?)_(\d{1,3})\s*=\s*(.*)")
_NETMASK_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """The settings of one card's port; empty: not set."""

    device: int
    address: str = ""
    netmask: str = ""
    gateway: str = ""
    netdetect: str = ""

    @property
    def network(self) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
        """What it can reach directly; None when address or netmask make no sense."""
        try:
            return ipaddress.ip_network(f"{self.address}/{self.netmask or _NETMASK_BITS}", strict=False)
        except ValueError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PortSettings:
    """All ports by device, and what is wrong with the text."""

    ports: dict[int, Port] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()


def parse(text: str) -> PortSettings:
    """Read the file's text."""
    values: dict[int, dict[str, str]] = {}
    wrong: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            if "=" not in line:
                wrong.append(f"line {number} has no '='")
            continue  # a key without a card's number
        key, device, value = match[1].lower(), int(match[2]), match[3].strip()
        known = values.setdefault(device, {})
        if key in known and known[key] != value:
            wrong.append(f"line {number} sets {key}_{device} again, to another value")
        known[key] = value
    names = ("address", "netmask", "gateway", "netdetect")
    ports = {
        device: Port(device=device, **{name: known.get(name, "") for name in names})
        for device, known in sorted(values.items())
        if any(name in known for name in names)
    }
    return PortSettings(ports=ports, wrong=(*wrong, *_conflicts(ports)))


def _conflicts(ports: dict[int, Port]) -> list[str]:
    wrong: list[str] = []
    seen: dict[str, int] = {}
    for port in ports.values():
        if not port.address:
            wrong.append(f"card {port.device} has no address")
            continue
        network = port.network
        if network is None:
            wrong.append(f"card {port.device}: {port.address}/{port.netmask} is no address with a netmask")
            continue
        if port.address in seen:
            wrong.append(f"cards {seen[port.address]} and {port.device} have the same address {port.address}")
        seen[port.address] = port.device
        if port.gateway and not _inside(port.gateway, network):
            wrong.append(f"card {port.device}: gateway {port.gateway} is not in {network}")
    return wrong


def _inside(text: str, network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> bool:
    try:
        return ipaddress.ip_address(text) in network
    except ValueError:
        return False


def families(ports: Sequence[Port]) -> frozenset[int]:
    """4, 6 or both: of which kind the cards' addresses are."""
    return frozenset(port.network.version for port in ports if port.network is not None)


CONTROL_FILES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
HCCN_CONF = "/etc/hccn.conf"
HCCN_TOOL = "/usr/local/Ascend/driver/tools/hccn_tool"
DRIVER_VERSION = "/usr/local/Ascend/driver/version.info"
LIBRARY = "libcann_hixl.so"
NIC_PORT_HEX = "411A"  # 16666
LISTENING = "0A"
ENVIRONMENT = re.compile(r"ASCEND_\w+|HCCL_\w+|LD_LIBRARY_PATH|KVXFER_CANN_LIBDIR|KVXFER_SIM_\w+")
TOOL_LIMIT_S = 5.0
CHILD_LIMIT_S = 30.0
CARDS_MAX = 64
MARK = "kvxfer-accelerator:"


def probe_ascend(root: Path = Path("/"), env: Mapping[str, str] | None = None) -> Ascend:
    """Everything that `judge_ascend` wants to know."""
    tree = Tree(root)
    environment = {name: value for name, value in (os.environ if env is None else env).items() if _matters(name)}
    devices = _devices(tree)
    directories = _directories(tree, environment)
    tool = _tool(tree)
    present = [name for name in CONTROL_FILES if tree.path(name).exists()]
    nodes = [*present, *(f"/dev/davinci{device}" for device in devices)]
    signs = bool(devices) or any(found for _, found in directories)
    return Ascend(
        devices=devices,
        missing=tuple(name for name in CONTROL_FILES if name not in present) if devices else (),
        denied=tuple(name for name in nodes if not os.access(tree.path(name), os.R_OK | os.W_OK)),
        driver=_driver(tree),
        hccn=tree.text(HCCN_CONF),
        hccn_tool=tool,
        links=tuple(_link(tool, device) for device in devices) if tool else (),
        environment=environment,
        directories=directories,
        holders=_holders(tree, devices),
        nic_port_taken=_nic_port_taken(tree),
        installed=installed(root, environment) if signs else {},
        accelerator=ask_libraries() if signs else Accelerator(),
    )


def _matters(name: str) -> bool:
    return ENVIRONMENT.fullmatch(name) is not None


def _devices(tree: Tree) -> tuple[int, ...]:
    matches = (re.fullmatch(r"davinci(\d+)", name) for name in tree.names("/dev"))
    return tuple(sorted(int(match[1]) for match in matches if match))[:CARDS_MAX]


def _directories(tree: Tree, environment: Mapping[str, str]) -> tuple[tuple[str, bool], ...]:
    """Where the toolkit's libraries may lie, in the order in which they are looked for, and whether they do."""
    home = environment.get("ASCEND_HOME_PATH", "")
    wanted = [
        environment.get("KVXFER_CANN_LIBDIR", ""),
        *((f"{home}/lib64", f"{home}/{platform.machine()}-linux/lib64") if home else ()),
        "/usr/local/Ascend/cann/lib64",
        "/usr/local/Ascend/ascend-toolkit/latest/lib64",
        *(path for path in environment.get("LD_LIBRARY_PATH", "").split(":") if "Ascend" in path),
    ]
    named = dict.fromkeys(name for name in wanted if name)
    return tuple((name, tree.path(f"{name}/{LIBRARY}").exists()) for name in named)


def _driver(tree: Tree) -> str:
    match = re.search(r"^Version=(\S+)", tree.text(DRIVER_VERSION) or "", re.MULTILINE)
    return match[1] if match else ""


def _holders(tree: Tree, devices: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Processes that have a card open, as far as this user may see."""
    wanted = {f"/dev/davinci{device}": device for device in devices}
    found: dict[int, set[int]] = {}
    for name in tree.names("/proc") if wanted else ():
        if not name.isdecimal():
            continue
        for descriptor in tree.names(f"/proc/{name}/fd"):
            try:
                target = os.readlink(tree.path(f"/proc/{name}/fd/{descriptor}"))
            except OSError:
                continue  # closed by now
            if target in wanted:
                found.setdefault(wanted[target], set()).add(int(name))
    return {device: tuple(sorted(pids)) for device, pids in sorted(found.items())}


def _nic_port_taken(tree: Tree) -> bool:
    """Does a process of this host listen on the port that cards use on their own NIC?"""
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (tree.text(name) or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 3 and fields[3] == LISTENING and fields[1].endswith(f":{NIC_PORT_HEX}"):
                return True
    return False


# -- hccn_tool --------------------------------------------------------------------------------------------------------


def _tool(tree: Tree) -> str:
    path = tree.path(HCCN_TOOL)
    return str(path) if os.access(path, os.X_OK) else shutil.which("hccn_tool") or ""


def _link(tool: str, device: int) -> CardLink:
    said: dict[str, str] = {}
    for word in ("link", "net_health", "tls"):
        try:
            done = subprocess.run(
                [tool, "-i", str(device), f"-{word}", "-g"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TOOL_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return CardLink(device=device, error=f"hccn_tool -{word} did not end within {TOOL_LIMIT_S:g} s")
        except OSError as failure:
            return CardLink(device=device, error=f"hccn_tool cannot be run: {failure.strerror}")
        said[word] = done.stdout + done.stderr
    return read_link(device, said)


def read_link(device: int, said: Mapping[str, str]) -> CardLink:
    """What hccn_tool printed, as facts; its lines look like `link status: UP` and `tls switch[0](0:disable, ...)`."""
    link = re.search(r"link status:\s*(\w+)", said.get("link", ""), re.IGNORECASE)
    health = re.search(r"health status:\s*([^\r\n]+)", said.get("net_health", ""), re.IGNORECASE)
    tls = re.search(r"tls switch\[(\d)\]", said.get("tls", ""), re.IGNORECASE)
    first = next((line.strip() for line in said.get("link", "").splitlines() if line.strip()), "")
    return CardLink(
        device=device,
        link=link[1].upper() if link else "",
        health=health[1].strip() if health else "",
        tls={"0": "off", "1": "on"}.get(tls[1], "") if tls else "",
        error="" if link else f"hccn_tool: {first[:120] or 'no answer'}",
    )


# -- the libraries ----------------------------------------------------------------------------------------------------


def ask_libraries(command: Sequence[str] = (), limit_s: float = CHILD_LIMIT_S) -> Accelerator:
    """What the child says; what became of it, when it says nothing."""
    words = list(command) or [sys.executable, "-m", "kvxfer.doctor.accelerator"]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Accelerator(why=f"the libraries did not answer within {limit_s:g} s: driver or card hangs")
    answers = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if answers:
        return read_answer(json.loads(answers[-1]))
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    ended = f"was killed by signal {-done.returncode}" if done.returncode < 0 else f"ended with {done.returncode}"
    return Accelerator(why=f"the process that loads the libraries {ended}: {last[:200]}")


def read_answer(answer: Mapping[str, Any]) -> Accelerator:
    """The child's JSON as facts."""
    cards = tuple(Card(**card) for card in answer.get("cards", ()))
    texts = {name: str(answer.get(name, "")) for name in ("why", "soc", "toolkit", "reported")}
    return Accelerator(
        found=bool(answer.get("found")),
        simulated=bool(answer.get("simulated")),
        paths=tuple(answer.get("paths", ())),
        lacks=tuple(answer.get("lacks", ())),
        cards=cards,
        **texts,
    )


# -- judging accelerators: driver, device files, network ports of the cards, toolkit, memory of the cards --------------
# Several of these are known from their symptoms only on somebody's cluster; what is advised is what helped there.
# Nothing here talks to HIXL's own port: sixteen idle connections freeze it.


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
_GROUP = FindingGroup("ascend")


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
        yield from _judge_driver(ascend)
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


def _judge_driver(ascend: Ascend) -> Iterator[Finding]:
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
