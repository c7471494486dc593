"""The demonstration as its readers run it: right tokens, seen to fail, and nothing left behind however it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.demo import compare
from tests.conftest import slack
from tests.native.ascend_sim.build import build
from tests.native.simulated import faults

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPT = "A prompt of a few blocks, so that the model has something to attend to. " * 3


class Demo:
    """One run with a temporary directory of its own, by which its processes are known."""

    def __init__(self, *words: str) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="kvxfer-", dir="/tmp")
        self.scratch, self.prompt = Path(self._place.name, "scratch"), Path(self._place.name, "prompt.txt")
        self.scratch.mkdir()
        self.prompt.write_text(PROMPT)
        command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--prompt", str(self.prompt)]
        self.process = subprocess.Popen(
            [*command, "--tokens", "4", "--repeat", "1", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(self.scratch), "KVXFER_TRANSPORTS": "tcp"},  # of no importance to it
        )

    def __enter__(self) -> Demo:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self._place.cleanup()

    def wait_for(self, step: str) -> None:
        """Until the progress line says so."""
        assert self.process.stderr is not None
        seen = []
        while line := self.process.stderr.readline():
            seen.append(line)
            if step in line:
                return
        raise AssertionError(f"no {step!r} in {seen}")

    def end(self) -> tuple[int, str, str]:
        """Status, stdout, stderr; and everything is gone."""
        out, err = self.process.communicate(timeout=40 * slack())
        deadline = time.monotonic() + 5 * slack()  # a killed process's entry may stay for a moment
        while self.children() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert self.children() == {}
        assert list(self.scratch.iterdir()) == []
        return self.process.returncode, out, err

    def children(self) -> dict[int, str]:
        """Daemons and workers of this run: pid to command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != self.process.pid:
                try:
                    told = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                except OSError:
                    continue
                if str(self.scratch).encode() in told:
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        return found


def test_every_way_gives_the_same_tokens() -> None:
    with Demo() as demo:
        status, out, err = demo.end()
    assert status == 0, err
    table = [line for line in out.splitlines() if re.match(r"(transport|shm|tcp) ", line)]
    assert [line.split()[:2] for line in table[1:]] == [
        ["shm", "push"], ["shm", "pull"], ["shm", "adopt"], ["tcp", "push"], ["tcp", "pull"],
    ]  # fmt: skip
    assert len({line.index("verified" if index == 0 else "4 tokens equal") for index, line in enumerate(table)}) == 1
    copies = {tuple(line.split()[:2]): line.split()[5] for line in table[1:]}
    assert (copies["shm", "push"], copies["shm", "pull"], copies["shm", "adopt"]) == ("1.00", "1.00", "0.00")
    assert out.rstrip().endswith("all verified")
    assert err.splitlines()[0].startswith("[1/10]")
    assert err.splitlines()[-1].startswith("[10/10]")


def test_a_damaged_cache_is_caught_every_way() -> None:
    with Demo("--damage", "--transports", "shm") as demo:
        status, out, err = demo.end()
    assert status == 1, err
    assert len(re.findall(r"^shm +(push|pull|adopt) .* TOKEN \d DIFFERS$", out, re.MULTILINE)) == 3
    assert "every damaged cache gave other tokens" in out


@pytest.mark.slow
def test_caches_on_simulated_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_CANN_LIBDIR", str(build()))
    monkeypatch.setenv("KVXFER_SIM_DIR", str(tmp_path))
    with Demo("--memory", "hbm", "--transports", "hixl") as demo:
        status, out, err = demo.end()
    assert status == 0, err
    assert len(re.findall(r"^hixl +(push|pull) .* 4 tokens equal$", out, re.MULTILINE)) == 2
    assert "hbm of 2 x KVXSim910 (simulated)" in out
    assert "no figure of a simulator is a hardware figure" in out
    assert faults(tmp_path) == []


@pytest.mark.parametrize(("number", "step"), [(signal.SIGINT, "decode worker"), (signal.SIGTERM, "starting daemons")])
def test_interrupted(number: signal.Signals, step: str) -> None:
    with Demo("--repeat", "1000") as demo:
        demo.wait_for(step)
        if number == signal.SIGINT:  # Ctrl-C goes to everybody in the foreground
            os.killpg(demo.process.pid, number)
        else:
            demo.process.send_signal(number)
        status, _, err = demo.end()
    assert status == 130
    assert err.splitlines()[-1] == "demo: interrupted; daemons and workers have ended"
    assert "Traceback" not in err


def lose_prompt(demo: Demo) -> None:
    demo.wait_for("undivided run")  # it has been read here, and the workers come later
    demo.prompt.unlink()


def kill_decode(demo: Demo) -> None:
    demo.wait_for("shm: push")
    (pid,) = [pid for pid, command in demo.children().items() if "demo_worker" in command and "22" in command]
    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (lose_prompt, r"^  prefill \| FileNotFoundError: .*prompt\.txt"),
        (kill_decode, r"^  decode \| \(ended with status -9\)$"),
    ],
)
def test_a_worker_that_dies_is_heard(harm: Callable[[Demo], None], expected: str) -> None:
    with Demo("--repeat", "1000") as demo:
        harm(demo)
        status, _, err = demo.end()
    assert status == 1
    assert "demo failed: " in err
    assert re.search(expected, err, re.MULTILINE), err
    assert 'demo.py", line' not in err  # no trace of our own


def test_compare_names_the_first_difference() -> None:
    assert compare([1, 2, 3], [1, 2, 3]) == "3 tokens equal"
    assert compare([1, 2, 3], [1, 9, 3]) == "TOKEN 1 DIFFERS"
    assert compare([1, 2, 3], [1, 2]) == "TOKEN 2 DIFFERS"
