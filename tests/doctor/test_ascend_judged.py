"""Judgements about accelerators, with made-up facts: from hosts without any to the troubles that people report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvxfer.config import Config
from kvxfer.doctor.ascend import judge_ascend, judge_settings, rdma_window_s
from kvxfer.doctor.facts import Accelerator, Ascend, Card, CardLink, Finding, FindingState, worst

GIB = 1 << 30
HOME = "/usr/local/Ascend/cann"
CARD = Card(device=0, free=60 * GIB, total=64 * GIB, physical=0)
LIBRARIES = Accelerator(
    found=True,
    soc="Ascend910B3",
    toolkit="9.1+",
    reported="9.1.0",
    paths=(f"{HOME}/lib64/libacl_rt.so",),
    cards=(CARD, replace(CARD, device=1, physical=1)),
)
GOOD = Ascend(
    devices=(0, 1),
    driver="25.5.0",
    hccn="address_0=29.1.0.10\nnetmask_0=255.255.0.0\naddress_1=29.1.0.11\nnetmask_1=255.255.0.0\n",
    hccn_tool="/usr/local/Ascend/driver/tools/hccn_tool",
    links=(CardLink(device=0, link="UP", tls="off", health="Success"), CardLink(device=1, link="UP", tls="off")),
    environment={
        "ASCEND_HOME_PATH": HOME,
        "LD_LIBRARY_PATH": f"{HOME}/lib64:/usr/local/Ascend/driver/lib64/driver",
    },
    directories=((f"{HOME}/lib64", True),),
    accelerator=LIBRARIES,
)


def judged(ascend: Ascend) -> list[Finding]:
    return list(judge_ascend(ascend, Config()))


def one(check: str, **changes: Any) -> Finding:
    [finding] = [finding for finding in judged(replace(GOOD, **changes)) if finding.check == check]
    return finding


def test_a_good_host() -> None:
    found = judged(GOOD)
    assert worst(found) is FindingState.OK, [finding for finding in found if finding.state is not FindingState.OK]
    assert {"devices", "libraries", "toolkit", "card 0", "card 1", "hccn.conf", "link of card 0"} <= {
        finding.check for finding in found
    }


def test_a_host_without_any() -> None:
    [finding] = judged(Ascend(directories=(("/a/lib64", False), ("/b/lib64", False))))
    assert finding.state is FindingState.NOT_HERE
    assert finding.found == "no accelerator libraries; looked in /a/lib64, /b/lib64"


def test_a_simulation_is_loud() -> None:
    simulated = replace(LIBRARIES, simulated=True, soc="KVXSim910")
    found = judged(Ascend(accelerator=simulated))
    assert (found[0].state, "SIMULATED" in found[0].found) == (FindingState.WARNING, True)
    assert [finding.check for finding in found if finding.check.startswith("card")] == [
        "card 0 (simulated)",
        "card 1 (simulated)",
    ]
    assert worst(found) is FindingState.WARNING, "files of a driver are not missed"


def test_a_container_without_its_device_files() -> None:
    assert "--device /dev/davinci_manager" in one("devices", missing=("/dev/davinci_manager",)).advice
    assert one("devices", denied=("/dev/davinci0",)).state is FindingState.PROBLEM
    assert "npu-smi" in one("devices", devices=()).advice


@pytest.mark.parametrize(
    ("environment", "directories", "state", "word"),
    [
        ({}, GOOD.directories, FindingState.WARNING, "ASCEND_HOME_PATH is not set"),
        ({"ASCEND_HOME_PATH": "/old"}, GOOD.directories, FindingState.PROBLEM, "holds no libraries"),
        ({"ASCEND_HOME_PATH": HOME}, GOOD.directories, FindingState.WARNING, "names nothing below"),
    ],
)
def test_set_env_was_not_sourced(environment: dict[str, str], directories: Any, state: FindingState, word: str) -> None:
    finding = one("toolkit environment", environment=environment, directories=directories)
    assert (finding.state, word in finding.found, "set_env.sh" in finding.advice) == (state, True, True)
    assert one("driver libraries", environment=environment).state is FindingState.WARNING


def test_libraries_that_do_not_load() -> None:
    missing = Accelerator(why="libhcomm.so is not loaded")
    finding = one("libraries", accelerator=missing)
    assert (finding.state, finding.found) == (FindingState.PROBLEM, "libhcomm.so is not loaded")


def test_libraries_of_two_toolkits_are_shown_in_full() -> None:
    assert one("libraries").found == f"Ascend910B3: libacl_rt.so in {HOME}/lib64"
    mixed = replace(LIBRARIES, paths=("/a/libacl_rt.so", "/b/libcann_hixl.so"))
    assert "/a/libacl_rt.so, /b/libcann_hixl.so" in one("libraries", accelerator=mixed).found


def test_an_old_toolkit() -> None:
    finding = one("toolkit", accelerator=replace(LIBRARIES, toolkit="8.5", lacks=("bulk status",)))
    assert (finding.state, "lacks bulk status" in finding.found) == (FindingState.WARNING, True)


@pytest.mark.parametrize(
    ("card", "state", "word"),
    [
        (replace(CARD, free=int(64 * GIB * 0.3)), FindingState.WARNING, "30%"),
        (replace(CARD, healthy=False), FindingState.PROBLEM, "reset"),
        (replace(CARD, error="device 0: the accelerator or its driver failed"), FindingState.PROBLEM, "npu-smi"),
    ],
)
def test_cards(card: Card, state: FindingState, word: str) -> None:
    finding = one("card 0", accelerator=replace(LIBRARIES, cards=(card,)))
    assert (finding.state, word in finding.advice) == (state, True)


def test_no_card_is_visible() -> None:
    environment = {**GOOD.environment, "ASCEND_RT_VISIBLE_DEVICES": ""}
    finding = one("cards", accelerator=replace(LIBRARIES, cards=()), environment=environment)
    assert (finding.state, "ASCEND_RT_VISIBLE_DEVICES" in finding.found) == (FindingState.PROBLEM, True)


@pytest.mark.parametrize(
    ("text", "state", "word"),
    [
        (None, FindingState.WARNING, "/etc/hccn.conf is not here"),
        ("address_0=1.1.1.1\nnetmask_0=255.255.0.0\n", FindingState.WARNING, "no address for card 1"),
        ("address_0=1.1.1.1\naddress_1=1.1.1.1\n", FindingState.PROBLEM, "the same address"),
        ("address_0=1.1.1.1\naddress_1=2001:db8::1\nnetmask_1=64\n", FindingState.WARNING, "IPv4 and some IPv6"),
    ],
)
def test_hccn_conf(text: str | None, state: FindingState, word: str) -> None:
    finding = one("hccn.conf", hccn=text)
    assert (finding.state, word in finding.found) == (state, True)


def test_links() -> None:
    down = CardLink(device=0, link="DOWN")
    assert one("link of card 0", links=(down,)).state is FindingState.WARNING, (
        "some supernodes say so although it is up"
    )
    assert "root" in one("link of card 0", links=(CardLink(device=0, error="hccn_tool: denied"),)).advice


def test_tls_must_be_the_same_on_all_cards() -> None:
    links = (CardLink(device=0, link="UP", tls="off"), CardLink(device=1, link="UP", tls="on"))
    finding = one("tls of the cards", links=links)
    assert (finding.state, "-tls -s enable" in finding.advice) == (FindingState.PROBLEM, True)


def test_an_engine_that_nobody_can_dial() -> None:
    wildcard: dict[str, Any] = {"listen": "0.0.0.0:0", "advertise": ("10.0.0.1",), "secret": "0123456789abcdef"}
    for config, expected in (
        (Config(**wildcard), [FindingState.WARNING]),
        (Config(**wildcard, data_advertise=("10.0.0.1",)), []),
    ):
        found = [finding for finding in judge_ascend(GOOD, config) if finding.check == "address"]
        assert [finding.state for finding in found] == expected


def test_a_card_with_several_processes() -> None:
    finding = one("card 1 shared", holders={0: (7,), 1: (7, 8)})
    assert (finding.state, "16666" in finding.advice, "7, 8" in finding.found) == (FindingState.WARNING, True, True)
    assert one("port 16666", nic_port_taken=True).state is FindingState.WARNING


@pytest.mark.parametrize(
    ("environment", "state"),
    [
        ({}, FindingState.OK),
        ({"HCCL_RDMA_TC": "132", "HCCL_RDMA_SL": "4", "HCCL_RDMA_TIMEOUT": "14"}, FindingState.OK),
        ({"HCCL_RDMA_TC": "130"}, FindingState.PROBLEM),
        ({"HCCL_RDMA_SL": "8"}, FindingState.PROBLEM),
        ({"HCCL_RDMA_RETRY_CNT": "many"}, FindingState.PROBLEM),
        ({"HCCL_INTRA_ROCE_ENABLE": "2"}, FindingState.PROBLEM),
        ({"HCCL_RDMA_TIMEOUT": "24"}, FindingState.WARNING),
    ],
)
def test_rdma_settings(environment: dict[str, str], state: FindingState) -> None:
    [finding] = judge_settings(environment, Config())
    assert finding.state is state


def test_the_time_that_rdma_tries() -> None:
    assert rdma_window_s({"HCCL_RDMA_TIMEOUT": 10, "HCCL_RDMA_RETRY_CNT": 2}) == pytest.approx(0.00838861)
