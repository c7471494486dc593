"""One suite, three event loops.

`KVXFER_TEST_LOOP` chooses: `asyncio` (the default), `debug` (asyncio in debug mode: slow callbacks, wrong threads,
coroutines that nobody awaited) or `uvloop`. A test that no loop can change (it is not a coroutine and uses no async
fixture), or that says so itself with the marker `once`, runs in the mode `asyncio` only. `KVXFER_TEST_SLACK` stretches
the time limits on slow machines.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import hypothesis
import pytest
import uvloop

# Before anything loads numpy: several BLAS threads wait for each other in busy loops on a machine with few cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

MODES = ("asyncio", "debug", "uvloop")


# Examples are drawn anew on a developer's machine, where a new failure is welcome, and are the same each time in CI.
hypothesis.settings.register_profile("ci", derandomize=True, print_blob=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")


def loop_mode() -> str:
    mode = os.environ.get("KVXFER_TEST_LOOP", "asyncio")
    if mode not in MODES:
        raise pytest.UsageError(f"KVXFER_TEST_LOOP={mode!r}: not one of {', '.join(MODES)}")
    return mode


def slack() -> float:
    return float(os.environ.get("KVXFER_TEST_SLACK", "1"))


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As in a job that a shell put into the background. It would stay so in every child, and some of them are to be
        # interrupted; a handler is not inherited, and this one still ignores the signal here.
        signal.signal(signal.SIGINT, lambda number, frame: None)
    config.addinivalue_line("markers", "once: no event loop changes the outcome; runs in one loop mode")
    config.addinivalue_line("markers", "slow: takes more than a few seconds; left out of `make check`")
    config.addinivalue_line("markers", "full: the long version of a case; runs under `make cases-full` only")
    if loop_mode() == "debug":
        config.option.asyncio_debug = True
    if config.getoption("timeout") is None and slack() > 1:
        config.option.timeout = float(config.getini("timeout")) * slack()


@pytest.fixture(scope="session", autouse=True)
def runtime_directory() -> Iterator[Path]:
    """Daemons of the tests, in this process and in others, have the secret of a directory that nobody else uses."""
    with tempfile.TemporaryDirectory(prefix="kvxr-") as place, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", place)
        yield Path(place)


def pytest_report_header() -> str:
    return f"event loop: {loop_mode()}, slack: {slack():g}"


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    mode = loop_mode()
    return {mode: uvloop.new_event_loop if mode == "uvloop" else asyncio.new_event_loop}


def loop_matters(item: pytest.Item) -> bool:
    return item.get_closest_marker("asyncio") is not None and item.get_closest_marker("once") is None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    full = os.environ.get("KVXFER_TEST_FULL", "") == "1"
    kept = [
        item
        for item in items
        if (loop_mode() == "asyncio" or loop_matters(item)) and (full or item.get_closest_marker("full") is None)
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept
