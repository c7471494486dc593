"""Log lines: text for people, one JSON object per line for collectors."""

from __future__ import annotations

import json
import logging

import pytest

from kvxfer.cli.logs import JsonFormatter, configure_logging


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
