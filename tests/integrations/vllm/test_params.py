"""`kv_transfer_params`: there and back, and what strangers may put into them."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from kvxfer.errors import UsageError
from kvxfer.integrations.vllm.params import Meeting, Rank, Remote, unavailable

REMOTE = Remote(
    engine_id="engine",
    request_id="request",
    tokens=100,
    mode="pull",
    compatibility="model=a",
    ranks=(Rank(node=("10.0.0.1:17800",), channel="vllm/engine/0"),),
)


def test_there_and_back_through_json() -> None:
    params = json.loads(json.dumps(REMOTE.to_params()))
    assert params["do_remote_prefill"] is True
    assert Remote.from_params(params) == REMOTE


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    params: Any = copy.deepcopy(REMOTE.to_params())
    found = params
    for key in path[:-1]:
        found = found[key]
    found[path[-1]] = value
    return dict(params)


RANKS = ("kvxfer", "ranks")


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"do_remote_prefill": True, "remote_block_ids": [[1]]},
        changed(("kvxfer",), None),
        changed(("kvxfer", "format"), 2),
        changed(RANKS, []),
        changed(RANKS, "x"),
        changed(RANKS, [None]),
        changed(RANKS, [{}] * 2000),
        changed((*RANKS, 0, "node"), []),
        changed((*RANKS, 0, "node"), ["a"] * 17),
        changed((*RANKS, 0, "node"), [7]),
        changed((*RANKS, 0, "channel"), ""),
        changed((*RANKS, 0, "channel"), "x" * 5000),
        changed(("kvxfer", "compatibility"), 1),
        changed(("remote_num_tokens",), 0),
        changed(("remote_num_tokens",), True),
        changed(("remote_num_tokens",), "100"),
        changed(("remote_engine_id",), None),
        changed(("remote_request_id",), ["x"]),
        changed(("transfer_mode",), None),
        unavailable("no daemon"),
    ],
)
def test_what_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Remote.from_params(params)


def test_a_meeting_says_where_decode_is() -> None:
    params = {"transfer_id": "t", "remote_node": "10.0.0.1:17800", "remote_tp_size": 2}
    assert Meeting.from_params(params, prefill=True) == Meeting(transfer_id="t", node=("10.0.0.1:17800",), ranks=2)
    assert Meeting.from_params(params, prefill=False) == Meeting(transfer_id="t")


@pytest.mark.parametrize(
    "params", [{}, {"transfer_id": "t"}, {"transfer_id": "t", "remote_node": "n", "remote_tp_size": 0}]
)
def test_a_meeting_that_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Meeting.from_params(params, prefill=True)
