"""Loggers whose handlers cannot hurt."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest

import kvxfer
from kvxfer.logs import logger


class Raises(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise ZeroDivisionError(record.getMessage())


@pytest.fixture
def raising() -> Raises:
    handler = Raises()
    root = logging.getLogger("kvxfer")
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


def test_a_handler_that_raises_is_told_of_and_does_no_harm(raising: Raises, capsys: pytest.CaptureFixture[str]) -> None:
    log = logger("kvxfer.test")
    for say in (log.debug, log.info, log.warning, log.error, log.exception):
        say("something %s", "odd")
    assert capsys.readouterr().err.count("ZeroDivisionError: something odd") == 5


def test_nothing_is_printed_where_logging_prints_nothing(
    raising: Raises, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logger("kvxfer.test").error("something odd")
    assert capsys.readouterr().err == ""


def test_a_line_names_its_caller(caplog: pytest.LogCaptureFixture) -> None:
    logger("kvxfer.test").warning("here")
    assert caplog.records[-1].filename == "test_logs.py"


async def test_transfers_and_links_do_not_notice(raising: Raises) -> None:
    async with kvxfer.local() as a, kvxfer.local() as b:
        source, target = await a.alloc(4096), await b.alloc(4096)
        source.array[:] = 7
        assert (await a.put(source, target.descriptor("rw"))).state == "done"
        assert target.array.all()
        await a.send(b.addresses, "letters", b"hello")
        assert await b.recv("letters", timeout=5) == b"hello"


def test_every_module_takes_its_logger_from_here() -> None:
    home = Path(kvxfer.__file__).parent
    allowed = {home / "logs.py", *home.glob("cli/*.py"), *home.glob("testing/**/*.py")}
    for path in set(home.rglob("*.py")) - allowed:
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        assert not any(node.attr == "getLogger" for node in calls), f"{path}: take it from kvxfer.logs"
