"""Looking for accelerators in a tree of files, through a made-up hccn_tool, and in a child that may misbehave."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvxfer.doctor import ascend as module
from kvxfer.doctor.ascend import ask_libraries, probe_ascend, read_link
from kvxfer.doctor.facts import Accelerator, Card, CardLink
from tests.doctor.test_host import plant

TOOL = """#!/bin/sh
case "$2 $3" in
"0 -link") echo "link status: UP" ;;
"1 -link") echo "link status: DOWN" ;;
*" -net_health") echo "net health status: Success" ;;
*" -tls") echo "dev_id:$2, tls switch[$2](0:disable, 1:enable), tls preconfigured[1]" ;;
esac
"""


def child(text: str, limit_s: float = 20) -> Accelerator:
    return ask_libraries([sys.executable, "-c", text], limit_s)


def test_nothing_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ask_libraries", lambda: pytest.fail("no child where there is no sign of a card"))
    ascend = probe_ascend(tmp_path, {"HOME": "/x", "HCCL_RDMA_TC": "4"})
    assert (ascend.devices, ascend.missing, ascend.hccn, ascend.accelerator) == ((), (), None, Accelerator())
    assert ascend.environment == {"HCCL_RDMA_TC": "4"}
    assert [name for name, found in ascend.directories if not found] == [
        "/usr/local/Ascend/cann/lib64",
        "/usr/local/Ascend/ascend-toolkit/latest/lib64",
    ]


def test_a_host_with_two_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ask_libraries", lambda: Accelerator(why="asked"))
    files = {
        "/dev/davinci0": "",
        "/dev/davinci1": "",
        "/dev/davinci_manager": "",
        "/etc/hccn.conf": "address_0=1.1.1.1",
        "/usr/local/Ascend/driver/version.info": "Version=25.5.0\nascendhal_version=7.35.23\n",
        "/opt/cann/lib64/libcann_hixl.so": "",
        module.HCCN_TOOL: TOOL,
        "/proc/net/tcp": "  sl  local_address rem_address   st\n   0: 00000000:411A 00000000:0000 0A 0\n",
        "/proc/7/fd/x": "",
        "/proc/8/fd/x": "",
    }
    root = plant(tmp_path, files)
    (root / module.HCCN_TOOL.lstrip("/")).chmod(0o755)
    for pid in (7, 8):
        os.symlink("/dev/davinci1", root / f"proc/{pid}/fd/3")
    ascend = probe_ascend(root, {"ASCEND_HOME_PATH": "/opt/cann", "KVXFER_CANN_LIBDIR": "/sim"})
    assert (ascend.devices, ascend.missing) == ((0, 1), ("/dev/devmm_svm", "/dev/hisi_hdc"))
    assert (ascend.driver, ascend.hccn) == ("25.5.0", "address_0=1.1.1.1")
    assert ascend.directories[:2] == (("/sim", False), ("/opt/cann/lib64", True))
    assert ascend.links == (
        CardLink(device=0, link="UP", tls="off", health="Success"),
        CardLink(device=1, link="DOWN", tls="on", health="Success"),
    )
    assert ascend.holders == {1: (7, 8)}
    assert ascend.nic_port_taken
    assert ascend.accelerator.why == "asked"


def test_what_hccn_tool_says_that_nobody_knows() -> None:
    assert read_link(3, {"link": "hccn_tool: need root\n"}).error == "hccn_tool: hccn_tool: need root"
    assert read_link(3, {}).error == "hccn_tool: no answer"


def test_a_tool_that_hangs_or_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOOL_LIMIT_S", 0.2)
    hanging = tmp_path / "hccn_tool"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    assert "did not end within 0.2 s" in module._link(str(hanging), 0).error
    broken = tmp_path / "broken"
    broken.write_text("\x7fELF")
    broken.chmod(0o755)
    assert "cannot be run" in module._link(str(broken), 0).error


def test_a_child_that_answers() -> None:
    answer = '{"found": true, "simulated": true, "soc": "KVXSim910", "cards": [{"device": 0, "free": 1, "total": 2}]}'
    found = child(f"print('noise of the vendor'); print({module.MARK + answer!r})")
    assert (found.found, found.simulated, found.soc) == (True, True, "KVXSim910")
    assert found.cards == (Card(device=0, free=1, total=2),)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("import os; os.kill(os.getpid(), 11)", "killed by signal 11"),
        ("raise SystemExit('no driver')", "ended with 1: no driver"),
        ("pass", "ended with 0: it said nothing"),
    ],
)
def test_a_child_that_fails(text: str, word: str) -> None:
    found = child(text)
    assert not found.found
    assert word in found.why


def test_a_child_that_hangs() -> None:
    assert "did not answer within 0.3 s" in child("import signal; signal.pause()", 0.3).why
