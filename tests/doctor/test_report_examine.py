"""The whole examination of this host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvxfer.config import Loaded, load
from kvxfer.doctor.facts import Accelerator, Ascend, FindingState
from kvxfer.doctor.report import gather, judge, own_accelerator
from tests.nodes import node

pytestmark = pytest.mark.once


def loaded(**flags: object) -> Loaded:
    return load(env={}, flags={"listen": "127.0.0.1:0", "http": "", **flags})


async def test_this_host() -> None:
    async with node(transports=("loop", "tcp")) as server:
        facts = await gather(loaded(), server.addresses, 5)
    found = list(judge(facts, loaded()))
    assert len({(finding.group, finding.check) for finding in found}) == len(found), "two findings of one name"
    groups = [finding.group for finding in found]
    assert groups == sorted(groups, key=groups.index), "a group is in one piece"
    assert {"kvxfer", "transports", "memory", "limits", "clock", "network", "rdma", "peers"} <= set(groups)
    assert not [finding for finding in found if finding.state is FindingState.PROBLEM]


async def test_warnings_of_the_configuration_are_findings() -> None:
    facts = await gather(loaded(), (), 5)
    [finding] = [
        finding
        for finding in judge(facts, replace(loaded(), warnings=("KVXFER_LISTN is no option",)))
        if finding.group == "configuration"
    ]
    assert (finding.state, "LISTN" in finding.found) == (FindingState.WARNING, True)


def test_own_accelerator() -> None:
    assert own_accelerator(Ascend()) == {}
    here = Ascend(accelerator=Accelerator(found=True, soc="KVXSim910", toolkit="8.5", simulated=True))
    assert own_accelerator(here) == {"soc": "KVXSim910", "toolkit": "8.5", "simulated": True}
    files = {"toolkit": "9.0", "driver": "25.5"}
    assert own_accelerator(Ascend(installed=files)) == files, "what cannot be loaded is installed all the same"
    both = own_accelerator(Ascend(installed=files, accelerator=here.accelerator))
    assert (both["toolkit"], both["driver"]) == ("8.5", "25.5")
