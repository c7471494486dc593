"""Looking at accelerators: driver and toolkit in the file system, hccn_tool, and the libraries in a process apart.

The libraries are the vendor's: they may take long, write to standard output, crash, or keep the process alive. A child
with a time limit asks them (`kvxfer.doctor.accelerator`), so that the doctor survives its patient. Where there is no
sign of an accelerator, no child is started.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvxfer.doctor.facts import Accelerator, Ascend, Card, CardLink
from kvxfer.doctor.probe_host import Tree
from kvxfer.native.installed import installed

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
