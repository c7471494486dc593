"""Options as such: how they are listed and shown; their values are tested through `Config`."""

from __future__ import annotations

import pytest

from kvxfer.config.options import LIST_ITEMS_MAX, Option
from kvxfer.errors import ConfigError


@pytest.mark.parametrize(
    ("option", "value", "shown"),
    [
        (Option(kind="size"), 1 << 30, "1GiB"),
        (Option(kind="size"), 1000, "1000"),
        (Option(kind="size"), 0, "0"),
        (Option(kind="seconds"), 5.0, "5"),
        (Option(kind="bool"), True, "true"),
        (Option(kind="list"), ("a", "b"), "a,b"),
        (Option(kind="int"), 7, "7"),
        (Option(kind="text", secret=True), "hush", "(hidden)"),
        (Option(kind="text", secret=True), "", ""),
    ],
    ids=str,
)
def test_shown_values_can_be_read_again(option: Option, value: object, shown: str) -> None:
    assert option.show(value) == shown


@pytest.mark.parametrize(
    ("option", "accepted"),
    [
        (Option(kind="int", min=1, max=9), "an integer from 1 to 9"),
        (Option(kind="size", min=1024, max=1 << 40), "bytes from 1KiB to 1TiB, as a number or with KiB, MiB or GiB"),
        (Option(kind="seconds", min=0.1, max=60), "a number of seconds from 0.1 to 60, without a unit"),
        (Option(kind="bool"), "true or false"),
        (Option(kind="text", choices=("a", "b")), "one of: a, b"),
        (Option(kind="list", choices=("a", "b")), "a list of distinct items from: a, b"),
        (Option(kind="address"), "host:port or [ipv6]:port"),
        (Option(kind="text", expects="a poem"), "a poem"),
    ],
    ids=lambda value: value.kind if isinstance(value, Option) else "",
)
def test_the_accepted_range_is_in_words(option: Option, accepted: str) -> None:
    assert option.accepted == accepted


def test_lists_are_bounded() -> None:
    option = Option(name="advertise", kind="list")
    hosts = [f"h{number}" for number in range(LIST_ITEMS_MAX)]
    assert len(option.parse(hosts, "test")) == LIST_ITEMS_MAX
    with pytest.raises(ConfigError, match=f"more than {LIST_ITEMS_MAX}"):
        option.parse([*hosts, "one-more"], "test")


def test_an_int_in_text_and_a_sign() -> None:
    option = Option(name="n", kind="int", min=-5, max=5)
    assert [option.parse(text, "test") for text in ("-5", "+3", "04")] == [-5, 3, 4]
    for text in ("5.0", "1_0", "0x1", " 1", "--1", "٣"):
        with pytest.raises(ConfigError, match="not an integer"):
            option.parse(text, "test")
