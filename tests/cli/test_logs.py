"""Log lines: text for people, one JSON object per line for collectors."""

from __future__ import annotations

import json
import logging

import pytest

from kvxfer.cli.logs import LINES_PER_S, SAME_LINES_PER_S, JsonFormatter, Throttle, configure_logging


@pytest.fixture(autouse=True)
def _root():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_lines_hold_message_and_exception() -> None:
    try:
        raise ValueError("inner")
    except ValueError as error:
        record = logging.LogRecord("kvxfer.x", logging.ERROR, __file__, 1, "it %s", ("broke",), None)
        record.exc_info = (type(error), error, error.__traceback__)
    row = json.loads(JsonFormatter().format(record))
    assert (row["level"], row["logger"], row["message"]) == ("error", "kvxfer.x", "it broke")
    assert "ValueError: inner" in row["exception"]
    assert row["time"].endswith("Z")


@pytest.mark.parametrize("form", ["text", "json"])
def test_level_is_obeyed(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning", form)
    logging.getLogger("kvxfer.x").info("quiet")
    logging.getLogger("kvxfer.x").warning("loud")
    shown = capsys.readouterr().err
    assert "loud" in shown
    assert "quiet" not in shown


class Lines:
    """What a throttle lets through, at a time of the test's choosing."""

    def __init__(self) -> None:
        self.now = 0.0
        self.throttle = Throttle(lambda: self.now)
        self.shown: list[str] = []

    def log(self, text: str, *values: object, level: int = logging.WARNING) -> None:
        record = logging.LogRecord("kvxfer.x", level, __file__, 1, text, values, None)
        if self.throttle.filter(record):
            self.shown.append(record.getMessage())


def test_same_text_is_bounded_and_what_was_left_out_is_told() -> None:
    lines = Lines()
    for number in range(1000):
        lines.log("the link to %s ended", number)
    assert lines.shown == [f"the link to {number} ended" for number in range(SAME_LINES_PER_S)]
    lines.log("another text")
    lines.now = 1.0
    lines.log("the link to %s ended", "x")
    lines.log("the link to %s ended", "y")
    left_out = 1000 - SAME_LINES_PER_S
    assert lines.shown[-3:] == [
        "another text",
        f"the link to x ended (and {left_out} more like it)",
        "the link to y ended",
    ]


def test_all_lines_together_are_bounded_but_not_errors_nor_debugging() -> None:
    lines = Lines()
    for number in range(500):
        lines.log(f"text {number}")
    assert len(lines.shown) == LINES_PER_S
    lines.log("broken", level=logging.ERROR)
    for number in range(100):
        lines.log("detail %s", number, level=logging.DEBUG)
    assert len(lines.shown) == LINES_PER_S + 1 + 100


def test_peer_cannot_forge_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "text")
    logging.getLogger("kvxfer.x").warning("the link to %s ended", "a\n2026 INFO all is well\x1b[2J")
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "\x1b" not in shown
