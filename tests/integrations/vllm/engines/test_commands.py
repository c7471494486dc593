"""The commands of docs/vllm.md, from an empty machine to the first token, as they are written there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.integrations.vllm.engines.harness import ROOT, free_port

PORTS = ("17800", "17801", "17810", "17811", "8000", "8100", "8200")


def commands(place: Path) -> str:
    """The block of the page, with ports that are free here and directories that are gone afterwards."""
    page = (ROOT / "docs/vllm.md").read_text()
    found = re.search(r"```bash\n(.*?)```", page, re.DOTALL)
    assert found is not None
    text = found.group(1)
    for port in PORTS:
        text = re.sub(rf"(?<=[: ]){port}\b", str(free_port()), text)
    return text.replace("/tmp/", f"{place}/")


@pytest.mark.full
def test_ten_commands(tmp_path: Path) -> None:
    text = commands(tmp_path)
    assert len([line for line in text.splitlines() if line]) <= 11
    log = tmp_path / "log"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    with log.open("wb") as errors:
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", text + "\necho the end\n"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        told = b""
        try:
            assert shell.stdout is not None
            while b"the end" not in told:
                chunk = os.read(shell.stdout.fileno(), 1 << 16)
                assert chunk, log.read_text()[-3000:]
                told += chunk
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait(20)
            if shell.stdout is not None:
                shell.stdout.close()
    answer = next(line for line in told.decode().splitlines() if line.startswith("{"))
    found, _ = json.JSONDecoder().raw_decode(answer)  # the next command's output follows in the same line
    assert found["choices"][0]["text"]
    moved = re.search(r'kvxfer_bytes_total\{[^}]*way="received"[^}]*\} ([0-9.e+]+)', told.decode())
    assert moved is not None, told.decode()
    assert float(moved.group(1)) > 0
