"""K24: what was asked for is what runs, and what is not understood stops the start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvxfer
from kvxfer.config import CONFIG_OPTIONS, load
from kvxfer.errors import ConfigError, TransportUnavailable
from kvxfer.native import _shim
from tests.cases.facts import limit
from tests.cases.harness import ROOT

pytestmark = [pytest.mark.once, pytest.mark.timeout(300)]
BARE = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHONPATH": ROOT}
# libstdc++ is for the one file that speaks to a library in C++; every distribution and manylinux have it
ALLOWED = re.compile(r"lib(c|pthread|dl|gcc_s|m|rt|stdc\+\+)\.so|ld-linux|linux-vdso|ld-musl")
LOOPBACK = """
import asyncio, kvxfer
async def main():
    async with kvxfer.local() as a:
        r, t = await a.alloc(4096), await a.alloc(4096)
        r.array[:] = 7
        await a.put(r, t.descriptor("w"))
        assert (t.array == 7).all()
asyncio.run(main())
print("moved")
"""


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env=BARE | environment,
        capture_output=True,
        text=True,
        timeout=limit(60),
        check=False,
    )


def test_c93_the_extension_needs_the_c_library_alone() -> None:
    told = subprocess.run(["ldd", _shim.__file__], capture_output=True, text=True, check=True).stdout
    names = [line.split()[0] for line in told.splitlines() if line.strip()]
    assert names
    assert [name for name in names if not ALLOWED.search(name)] == []
    assert run("-c", LOOPBACK).stdout == "moved\n"


@pytest.mark.slow
@pytest.mark.full
def test_c93_a_clean_venv(tmp_path: Path) -> None:
    wheel, place = tmp_path / "wheel", tmp_path / "venv"
    common = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*common, "-w", str(wheel), ROOT], check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    [built] = wheel.glob("kvxfer-*.whl")
    python = place / "bin" / "python"
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # or it were there already
    subprocess.run([str(python), "-m", "pip", "install", "-q", str(built)], env=clean, check=True, capture_output=True)
    environment = {"PATH": BARE["PATH"], "HOME": BARE["HOME"]}
    done = subprocess.run([str(python), "-c", LOOPBACK], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "moved\n", done.stderr


@pytest.mark.parametrize("named", [("hixl",), ("hixl", "tcp")])
async def test_c94_a_transport_that_cannot_be_used_stops_the_start(
    named: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVXFER_CANN_LIBDIR", str(tmp_path))
    with pytest.raises(TransportUnavailable) as caught:
        async with kvxfer.local(transports=named):
            pytest.fail("nothing else may be tried")
    assert "hixl" in str(caught.value)
    assert re.search(r"lib\w+\.so|librar", str(caught.value)), "which library, and where it was looked for"


def test_c94_a_named_transport_opens_nothing_else() -> None:
    script = LOOPBACK.replace("kvxfer.local()", "kvxfer.local(transports=('tcp',))") + (
        "\nimport re\nmaps = open('/proc/self/maps').read()\n"
        "print(sorted(set(re.findall(r'lib(?:hixl|ascendcl|acl|cuda|ucp|ibverbs)[^ ]*', maps))))\n"
    )
    done = run("-c", script)
    assert done.stdout == "moved\n[]\n", done.stderr


BAD = {
    "int": ("abc", "-1", "", "9" * 30, "1.5", "10GiB"),
    "size": ("abc", "-1", "", "9" * 30, "1 parsec"),
    "seconds": ("abc", "-1", "", "9" * 30, "10ms"),
    "bool": ("abc", "-1", "", "2"),
    "address": ("abc def", "-1:x", "host:99999"),
    "host": ("abc def", "-1"),
}


def test_c95_every_option_refuses_what_it_cannot_mean() -> None:
    tried = 0
    for option in CONFIG_OPTIONS:
        for value in BAD.get(option.kind, ("x" * 5000,)):
            if value == "-1" and option.min <= -1:
                continue
            with pytest.raises(ConfigError) as caught:
                load(env={f"KVXFER_{option.name.upper()}": value})
            told = caught.value
            assert told.fields["key"] == option.name
            assert told.fields["accepted"]
            assert option.secret or "value" in told.fields
            assert f"KVXFER_{option.name.upper()}" in str(told.fields["source"])
            tried += 1
    assert tried > 200


def test_c95_a_daemon_with_a_typo_opens_nothing(tmp_path: Path) -> None:
    place = tmp_path / "d"
    done = run("-m", "kvxfer", "serve", KVXFER_LEASE_S="ten", KVXFER_SOCKET_DIR=str(place), KVXFER_LISTEN="127.0.0.1:0")
    assert done.returncode == 2
    for word in ("lease_s", "ten", "KVXFER_LEASE_S", "86400"):
        assert word in done.stderr
    assert not place.exists()


def test_c95_unknown_keys_and_where_values_come_from() -> None:
    done = run("-m", "kvxfer", "config", KVXFER_LEASE_SS="5", KVXFER_DRAIN_S="7")
    assert done.returncode == 0
    assert "KVXFER_LEASE_SS" in done.stderr
    assert "lease_s" in done.stderr.split("KVXFER_LEASE_SS")[1].lower(), "the nearest match"
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert set(rows) == {option.name for option in CONFIG_OPTIONS}
    assert re.search(r"drain_s +7 +environment KVXFER_DRAIN_S", rows["drain_s"])
    assert rows["lease_s"].split()[1:] == ["60", "default"]
