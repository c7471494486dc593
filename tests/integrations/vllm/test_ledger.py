"""What the scheduler side decides, without vLLM: the ordinary way, and every way in which it can go wrong."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.integrations.vllm.ledger import EngineInfo, Ledger, Request, difference
from kvxfer.integrations.vllm.orders import Receive
from kvxfer.integrations.vllm.params import Rank, Remote
from kvxfer.integrations.vllm.settings import Settings

RANK = Rank(node=("10.0.0.1:17800",), channel="vllm/p/0")
BLOCKS = [[1, 2, 3, 4]]
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def ledger(*, workers: int = 1, reached: bool = True, **how: Any) -> Ledger:
    roles = {"produces": how.pop("produces", True), "consumes": how.pop("consumes", True)}
    compatibility = how.pop("compatibility", "model=a;vllm=1")
    engine = EngineInfo(id="p", compatibility=compatibility, block_tokens=(32,), workers=workers, **roles)
    made = Ledger(Settings.of(how), engine)
    if reached:
        made.reached(dict.fromkeys(range(workers), RANK))
    return made


def handed_over(made: Ledger | None = None) -> dict[str, Any]:
    """What a prefill engine answers."""
    answer = (made or ledger()).finished(
        Request(id="p-1", prompt_tokens=100, params={**PREFILL}), BLOCKS, 100, completed=True
    )
    assert answer[0]
    assert answer[1] is not None
    return answer[1]


def wanted(**changes: Any) -> Request:
    return Request(id="d-1", prompt_tokens=100, params={**handed_over(), **changes})


def received(made: Ledger, request: Request, external: int = 100) -> Receive:
    made.allocated(request, BLOCKS, external)
    return made.take_orders().receive[request.id]


def test_prefill_keeps_the_blocks_until_they_were_sent() -> None:
    made = ledger()
    params = handed_over(made)
    assert Remote.from_params(params).ranks == (RANK,)
    orders = made.take_orders()
    assert orders.send["p-1"].tables[0].blocks == (1, 2, 3, 4)
    assert made.kept == {"p-1"}
    made.ended({"p-1"}, set())
    assert made.kept == set()
    assert not made.take_orders().send


def test_decode_waits_for_all_tokens_that_it_does_not_have() -> None:
    made, request = ledger(), wanted()
    assert made.matched(request, 0) == (100, True)
    assert made.matched(request, 32) == (68, True)  # asked again, with a prefix of its own
    found = received(made, request, 68)
    assert (found.refused, found.tables[0].first, found.tables[0].blocks) == ("", 32, (2, 3, 4))
    assert made.matched(request, 0) == (0, False)  # after a preemption, say: once is enough
    made.ended(set(), {"d-1"})
    assert made.loading == set()


def test_a_whole_prefix_hit_lets_prefill_go() -> None:
    made, request = ledger(), wanted()
    assert made.matched(request, 100) == (0, False)
    made.allocated(request, BLOCKS, 0)
    orders = made.take_orders()
    assert not orders.receive
    assert [remote.request_id for remote in orders.dropped] == ["p-1"]


def test_few_tokens_are_computed_and_not_moved() -> None:
    made, request = ledger(kv_recompute_threshold=50), wanted()
    assert made.matched(request, 32) == (68, True)
    assert made.matched(request, 64) == (0, False)
    made.allocated(request, BLOCKS, 0)
    assert made.take_orders().dropped


def test_aborted_before_it_was_scheduled() -> None:
    made, request = ledger(), wanted()
    assert made.finished(request, [[]], 0, completed=False) == (False, None)
    assert made.take_orders().dropped
    assert made.finished(request, [[]], 0, completed=False) == (False, None)
    assert not made.take_orders().dropped


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kvxfer": None}, "not of kvxfer's connector"),
        ({"kvxfer": {"format": 1, "error": "no daemon"}}, "no daemon"),
        ({"remote_num_tokens": "x"}, "remote_num_tokens"),
        ({"transfer_id": ""}, "transfer_id"),
    ],
)
def test_what_makes_no_sense_fails_as_a_transfer_does(changes: dict[str, Any], told: str) -> None:
    made, request = ledger(), wanted(**changes)
    assert made.matched(request, 0) == (100, True)
    assert told in received(made, request).refused


def test_unlike_engines() -> None:
    made, request = ledger(compatibility="model=b;vllm=1"), wanted()
    made.matched(request, 0)
    refused = received(made, request).refused
    assert "model is 'a' at prefill, 'b' here" in refused
    made, request = ledger(compatibility="model=b;vllm=1", enforce_handshake_compat=False), wanted()
    made.matched(request, 0)
    assert received(made, request).refused == ""
    assert "nothing about itself" in difference("", "")


def test_wrong_roles() -> None:
    made, request = ledger(consumes=False), wanted()
    made.matched(request, 0)
    assert "kv_producer" in received(made, request).refused
    answer = ledger(produces=False).finished(
        Request(id="x", prompt_tokens=100, params={**PREFILL}), BLOCKS, 100, completed=True
    )
    assert not answer[0]
    assert answer[1] is not None
    assert "kv_consumer" in answer[1]["kvxfer"]["error"]


def test_workers_that_have_no_daemon_yet() -> None:
    made = ledger(workers=2, reached=False)
    made.reached({1: RANK})
    request = Request(id="p-1", prompt_tokens=100, params={**PREFILL})
    kept, answer = made.finished(request, BLOCKS, 100, completed=True)
    assert not kept
    assert answer is not None
    assert "1 of the 2 workers" in answer["kvxfer"]["error"]
    made.reached({0: RANK})
    assert handed_over(made)


def test_an_aborted_prompt_is_not_handed_over() -> None:
    made = ledger()
    request = Request(id="p-1", prompt_tokens=100, params={**PREFILL})
    assert made.finished(request, BLOCKS, 64, completed=False) == (False, None)
    assert made.finished(Request(id="p-2", prompt_tokens=1, params=None), BLOCKS, 1, completed=True) == (False, None)


STREAMED = {**PREFILL, "transfer_id": "t", "remote_node": ["10.0.0.2:17800"]}


def streaming(made: Ledger) -> Request:
    request = Request(id="p-1", prompt_tokens=100, params={**STREAMED})
    made.allocated(request, BLOCKS, 0)
    return request


def test_layers_go_with_the_last_chunk_of_a_prompt() -> None:
    made = ledger(mode="layerwise")
    request = streaming(made)
    made.scheduled("p-1", 0, 64, [[1, 2]], fresh=True)
    assert not made.take_orders().stream
    made.scheduled("p-1", 64, 36, [[3, 4]], fresh=False)
    found = made.take_orders().stream["p-1"]
    assert (found.tables[0].blocks, found.tables[0].tokens) == ((1, 2, 3, 4), 100)
    assert made.finished(request, BLOCKS, 100, completed=True) == (True, None)
    assert made.kept == {"p-1"}
    assert not made.take_orders().send


def test_a_stream_that_is_preempted_ends_before_its_blocks_are_used() -> None:
    made = ledger(mode="layerwise")
    request = streaming(made)
    made.scheduled("p-1", 0, 100, BLOCKS, fresh=True)
    made.preempted({"p-1", "another"})
    assert made.take_orders().stopped == {"p-1"}
    assert made.finished(request, BLOCKS, 100, completed=True) == (False, None)


def test_a_stream_that_is_aborted() -> None:
    made = ledger(mode="layerwise")
    request = streaming(made)
    made.scheduled("p-1", 0, 100, BLOCKS, fresh=True)
    assert made.finished(request, BLOCKS, 100, completed=False) == (True, None)
    assert made.take_orders().cancelled == {"p-1"}


def test_a_prompt_whose_meeting_makes_no_sense_is_only_computed() -> None:
    made = ledger(mode="layerwise")
    request = Request(id="p-1", prompt_tokens=100, params={**STREAMED, "remote_node": 7})
    made.allocated(request, BLOCKS, 0)
    assert "remote_node" in made.take_warnings()[0]
    made.scheduled("p-1", 0, 100, BLOCKS, fresh=True)
    assert not made.take_orders().stream


def test_decode_meets_prefill_by_name() -> None:
    made = ledger()
    request = Request(id="d-1", prompt_tokens=100, params={"do_remote_prefill": True, "transfer_id": "t"})
    assert made.matched(request, 0) == (100, True)
    found = received(made, request)
    assert found.meeting is not None
    assert found.meeting.transfer_id == "t"
    late = Request(id="d-2", prompt_tokens=100, params={"do_remote_prefill": True, "transfer_id": "t"})
    made.finished(late, [[]], 0, completed=False)
    assert not made.take_orders().dropped
