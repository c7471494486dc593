"""The tests of promises that nobody notices when they hold can fail: each is played with an engine that breaks the
promise on purpose (`mutants/mutations.py`), and has to say so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.adversity.test_cancel_pattern import CARD_LATENCY_US
from tests.native.mutants import build
from tests.native.mutants.mutations import ALL, CANCEL, Mutation
from tests.native.mutants.run import Player
from tests.native.simulated import environment
from tests.native.sources import named

pytestmark = pytest.mark.slow
PATTERNS = "tests.adversity.test_cancel_pattern"
CANCELLED = "test_no_byte_moves_after_cancel"
TAKEN_BACK = "test_no_byte_moves_after_the_owner_has_taken_it_back"
ENCRYPTED, SEALED = "tests.native.test_tcp_encrypted", "tests.native.test_tcp_sealed"
# Of the source: its pages were lent, and are read later.
LATER_CONTENTS = r"bytes, from number \d+, are [^\n]*0x5b\b[^\n]* on the side theirs"


@dataclass(frozen=True, slots=True)
class Play:
    """A bug, the test that has to see it, and what it has to say."""

    bug: str
    module: str
    body: str
    arguments: tuple[str, ...] = ()
    says: str = r"on the side (ours|theirs) after (cancel\(\) had returned|it was done)"

    @property
    def name(self) -> str:
        return "-".join((self.bug, *self.arguments))

    @property
    def cards(self) -> bool:
        return self.body.endswith("_between_cards")


def cancelled(bug: str, kind: str, load: str, **more: str) -> Play:
    return Play(bug, PATTERNS, CANCELLED, (kind, load), **more)


def taken_back(bug: str, *arguments: str, body: str = TAKEN_BACK) -> Play:
    return Play(bug, PATTERNS, body, arguments, r"after revoke\(\) had returned")


PLAYS = (
    cancelled("shm_first_job_ends_it", "shm-coarse", "alone"),
    cancelled("tcp_put_let_go", "tcp", "alone", says=LATER_CONTENTS),
    cancelled("tcp_put_let_go", "tcp-copied", "alone"),
    cancelled("tcp_get_still_written", "tcp", "alone"),
    cancelled("tcp_get_still_written", "tcp-sealed", "alone"),
    cancelled("loop_goes_on", "loop", "alone"),
    cancelled("fault_handed_on", "fault", "alone"),
    Play("hixl_batches_left_behind", PATTERNS, "cancelled_between_cards", ("network",)),
    Play("hixl_batches_left_behind", PATTERNS, "cancelled_between_cards", ("copy",)),
    taken_back("shm_owner_does_not_wait", "shm-coarse", "alone"),
    taken_back("shm_answered_while_copying", "shm-coarse", "alone"),
    taken_back("tcp_frame_received_to_its_end", "tcp", "alone"),
    taken_back("loop_copies_without_access", "loop", "alone"),
    taken_back("hixl_owner_does_not_wait", "network", body="taken_back_between_cards"),
    taken_back("hixl_answered_while_moving", "copy", body="taken_back_between_cards"),
    Play("tag_not_compared", ENCRYPTED, "a_bit_of_the_tag", (), "the next ones went well"),
    Play("number_of_before_accepted", SEALED, "an_old_record", (), "an old record opened"),
    Play(
        "number_stands_still", ENCRYPTED, "test_the_other_implementation_puts_and_gets", (), r"the tag is wrong|Refused"
    ),
    Play("frame_in_clear_accepted", SEALED, "test_a_frame_in_clear_is_not_taken", (), "it was answered"),
    Play("frame_in_clear_accepted", SEALED, "test_an_answer_in_clear_is_not_taken", (), "in clear was taken"),
    Play("key_kept", SEALED, "it_is_dialled", (), r"the tag is wrong|Refused"),
    Play("chain_kept", SEALED, "it_dials", (), r"the tag is wrong|Refused"),
)


# Some bugs show in one interleaving of threads only. A test that sees nothing in so many plays does not see the bug.
PLAYS_MAX = 4


@pytest.fixture(scope="module")
def player() -> Iterator[Player]:
    with Player(PATTERNS, ENCRYPTED, SEALED) as one:
        yield one


@pytest.mark.parametrize("play", PLAYS, ids=lambda play: play.name)
def test_the_bug_is_seen(player: Player, play: Play, tmp_path: Path) -> None:
    cards = environment(tmp_path, LATENCY_US=CARD_LATENCY_US) if play.cards else None
    for _ in range(PLAYS_MAX):
        done = player.play(play.module, play.body, *play.arguments, bug=play.bug, folder=tmp_path, environment=cards)
        if done.status:
            break
    assert done.status == 1, f"status {done.status}\n{done.said[-4000:]}"
    assert re.search(play.says, done.said), done.said[-4000:]


def test_every_bug_is_played() -> None:
    assert {play.bug for play in PLAYS} == set(ALL)


@pytest.mark.parametrize(
    ("module", "body", "arguments"),
    [
        *((PATTERNS, "briefly", (kind,)) for kind in ("shm-coarse", "tcp", "loop", "fault")),
        (SEALED, "it_is_dialled", ()),
        (SEALED, "it_dials", ()),
    ],
)
def test_without_a_bug_all_is_well(
    player: Player, module: str, body: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """The same engine: what is seen above is the bug. Sealed: both implementations go on with the same next keys."""
    done = player.play(module, body, *arguments, folder=tmp_path)
    assert done.status == 0, done.said[-4000:]


def test_a_bug_that_does_not_fit_its_file_any_more_is_told() -> None:
    name, known = next(iter(CANCEL.items()))
    text = named(known.file).read_text()
    for changes in ((("nowhere\n", ""),), (("return", ""),)):
        with pytest.raises(build.NotThere, match=name):
            build.changed(text, name, Mutation(known.file, changes))
    assert f'kvx_mutant("{name}")' in build.changed(text, name, known)
