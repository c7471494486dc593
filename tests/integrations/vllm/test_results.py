"""What is counted, merged and told of transfers."""

from __future__ import annotations

from kvxfer.integrations.vllm import results
from kvxfer.integrations.vllm.results import RECEIVED, SENT, Moved, Results


def test_what_ended_is_taken_once() -> None:
    found = Results()
    found.received("a")
    found.received("b", failed=True, blocks={1, 2})
    found.sent("c")
    batch = found.take()
    assert (batch.received, batch.failed, batch.failed_blocks, batch.sent) == ({"a", "b"}, {"b"}, {1, 2}, {"c"})
    assert found.take() == results.ResultBatch()


def test_records_of_workers_are_merged() -> None:
    one, other = Results(), Results()
    assert one.take_record() is None
    one.moved(Moved(way=RECEIVED, bytes=1_000_000, tokens=10, seconds=0.5))
    one.failure("timeout")
    other.moved(Moved(way=SENT, bytes=3, tokens=1, seconds=0.1))
    other.failure("timeout")
    other.expired()
    record, more = one.take_record(), other.take_record()
    assert record is not None
    assert more is not None
    results.add(record, more)
    assert record["failures"] == {"timeout": 2}
    told = results.summary(record)
    assert (told["requests received"], told["MB/s received"], told["failures"], told["expired leases"]) == (
        1,
        2.0,
        2,
        1,
    )
    assert one.take_record() is None
    assert results.is_empty(results.empty())
