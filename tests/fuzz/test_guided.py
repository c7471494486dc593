"""The coverage-guided fuzzer: it finds a planted fault that chance would not, and short runs of every target."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from kvxfer.descriptors import RemoteDescriptor, Ticket
from kvxfer.errors import UsageError
from tests.fuzz import guided, targets
from tests.fuzz.guided import Fuzzer, Target


def planted(data: bytes) -> None:
    """Fails for one beginning of four bytes; each right byte is a line further."""
    if data[:1] != b"k":
        return
    if data[1:2] != b"v":
        return
    if data[2:3] != b"x":
        return
    if data[3:4] == b"f":
        raise ZeroDivisionError


def one_byte(data: bytes, kept: list[bytes], random: Random) -> bytes:
    changed = bytearray(data)
    changed[random.randrange(len(changed))] = random.randrange(256)
    return bytes(changed)


def test_coverage_leads_to_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guided, "CRASHES", tmp_path)
    target = Target("planted", planted, (__name__,), lambda: [b"...."], one_byte)
    fuzzer = Fuzzer(target, Random(1))
    with pytest.raises(ZeroDivisionError):
        fuzzer.run(rounds=200_000)
    [saved] = tmp_path.iterdir()
    assert saved.read_bytes() == b"kvxf"
    assert f"python -m tests.fuzz.guided planted {saved}" in capfd.readouterr().err


@pytest.mark.parametrize("name", targets.TARGETS)
def test_targets(name: str) -> None:
    fuzzer = Fuzzer(targets.TARGETS[name], Random(1))
    fuzzer.run(rounds=60)
    assert len(fuzzer.kept) >= 5
    assert len(fuzzer.seen) > 60, "deep enough to mean something"


@pytest.mark.parametrize("kind", [RemoteDescriptor, Ticket])
@pytest.mark.parametrize("odd", [10**400, "[" * 900 + "]" * 900])
def test_values_that_were_no_typed_error_once(kind: type[RemoteDescriptor] | type[Ticket], odd: object) -> None:
    seed = targets.descriptors()[0] if kind is RemoteDescriptor else targets.tickets()[0]
    raw = targets.json.loads(seed)
    deep: object = odd
    if isinstance(odd, str):
        deep = []
        for _ in range(100_000):
            deep = [deep]
    for name in raw:
        with pytest.raises(UsageError):
            kind.from_dict(raw | {name: deep})
