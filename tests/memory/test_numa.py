"""NUMA facts from a made-up sysfs, and threads that are bound where the machine allows it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from kvxfer.errors import ConfigError, UsageError
from kvxfer.memory import numa


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    return write(
        tmp_path,
        {
            "devices/system/node/online": "0-1",
            "devices/system/node/node0/cpulist": "0-3,8",
            "devices/system/node/node1/cpulist": "4-7",
        },
    )


def card(root: Path, address: str, node: str, *, kind: str = "0x120000", vendor: str = "0x19e5") -> None:
    folder = f"bus/pci/devices/{address}"
    write(root, {f"{folder}/vendor": vendor, f"{folder}/class": kind, f"{folder}/numa_node": node})


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0", (0,)), ("0-2,5", (0, 1, 2, 5)), ("3,1\n", (1, 3)), ("", ()), ("a", ()), ("1-", ()), ("-1", ())],
)
def test_lists_of_the_kernel(text: str, numbers: tuple[int, ...]) -> None:
    assert numa.parse_list(text) == numbers


def test_nodes_and_their_cpus(two_nodes: Path, tmp_path: Path) -> None:
    assert numa.nodes(two_nodes) == (0, 1)
    assert (numa.cpu_node(8, two_nodes), numa.cpu_node(5, two_nodes), numa.cpu_node(9, two_nodes)) == (0, 1, None)
    assert numa.nodes(tmp_path / "nothing") == ()


def test_the_cpu_of_this_thread() -> None:
    before = os.sched_getaffinity(0)
    one = max(before)
    try:
        os.sched_setaffinity(0, {one})
        assert numa.this_cpu() == one
    finally:
        os.sched_setaffinity(0, before)
    assert numa.this_cpu(Path("/nonexistent")) is None


def test_a_card_by_its_number(two_nodes: Path) -> None:
    card(two_nodes, "0000:01:00.0", "0")
    card(two_nodes, "0000:c1:00.0", "1")
    assert numa.device_node(0, two_nodes) is None  # addresses do not say which card is number 0
    write(two_nodes, {"class/devdrv-class/davinci0/device/numa_node": "1"})
    assert numa.device_node(0, two_nodes) == 1


def test_cards_that_share_a_node(two_nodes: Path) -> None:
    card(two_nodes, "0000:c1:00.0", "1")
    card(two_nodes, "0000:c2:00.0", "1")
    card(two_nodes, "0000:00:1f.0", "0", kind="0x020000")
    card(two_nodes, "0000:00:20.0", "0", vendor="0x8086")
    assert numa.device_node(5, two_nodes) == 1
    assert numa.device_node(None, two_nodes) == 1


def test_firmware_that_does_not_say(two_nodes: Path) -> None:
    card(two_nodes, "0000:c1:00.0", "-1")
    assert numa.device_node(0, two_nodes) is None


def test_choosing(two_nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "this_cpu", lambda: 2)
    card(two_nodes, "0000:c1:00.0", "1")
    assert numa.choose(None, root=two_nodes) is None
    assert numa.choose(1, root=two_nodes) == 1
    assert numa.choose("auto", root=two_nodes) == 0
    assert numa.choose("auto", 0, on_device=True, root=two_nodes) == 1
    with pytest.raises(UsageError, match="no such NUMA node") as caught:
        numa.choose(2, root=two_nodes)
    assert caught.value.fields["nodes"] == "0 1"
    for wrong in ("1", -1, True, 1.0, numa.NODES_MAX):
        with pytest.raises(UsageError, match="numa_node"):
            numa.choose(wrong, root=two_nodes)


def test_threads_are_bound_and_this_one_is_put_back(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    root = write(tmp_path, {"devices/system/node/online": "0", "devices/system/node/node0/cpulist": str(one)})
    with numa.threads_on("0", root) as outcome:
        assert (outcome, os.sched_getaffinity(0)) == ("bound", {one})
    assert os.sched_getaffinity(0) == before
    with numa.threads_on("", root) as outcome:
        assert (outcome, os.sched_getaffinity(0)) == ("none", before)


def test_threads_that_cannot_be_bound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = write(tmp_path, {"devices/system/node/online": "0", "devices/system/node/node0/cpulist": "999999"})
    before = os.sched_getaffinity(0)
    with caplog.at_level(logging.WARNING, "kvxfer.numa"), numa.threads_on("0", root) as outcome:
        assert (outcome, os.sched_getaffinity(0)) == ("not applied", before)
    assert len(caplog.records) == 1
    assert "node 0" in caplog.text


def test_threads_go_where_the_configuration_says(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    with numa.threads_at(""):
        assert os.sched_getaffinity(0) == before
    with numa.threads_at(str(one)):
        assert os.sched_getaffinity(0) == {one}
        with numa.threads_at("all"):  # a pinned thread reaches all of them again
            assert os.sched_getaffinity(0) >= before
        assert os.sched_getaffinity(0) == {one}
    assert os.sched_getaffinity(0) == before
    root = write(tmp_path, {"devices/system/cpu/online": f"{one}"})
    for wrong in ("99999", f"{one},99999", "99990-99999"):
        with pytest.raises(ConfigError), numa.threads_at(wrong, root):
            raise AssertionError
        assert os.sched_getaffinity(0) == before
