"""`tools/system-packages`: says what is missing and what for, installs it where it may, and nothing elsewhere."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.native.aarch64 import run as aarch64
from tests.system import ROOT, missing

SCRIPT = ROOT / "tools" / "system-packages"
TOOLS = ("bash", "sed", "cut", "tr", "sort", "grep", "cat", "make", "gcc", "g++", "python3")
APT = """#!/bin/sh
echo "$@" >> {place}/apt
case "$*" in
    *install*)
        for one in {provides}; do
            printf '#!/bin/sh\\n{says}\\n' > {place}/$one
            chmod 755 {place}/$one
        done
        ;;
esac
{status}
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A machine that has what is needed to build, and none of what only some tests need."""
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None, name
        (tmp_path / name).symlink_to(found)
    written(tmp_path / "id", "#!/bin/sh\necho 1000\n")
    written(tmp_path / "apt-cache", "#!/bin/sh\necho '  Depends: clang-17'\n")
    return tmp_path


def written(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def apt(place: Path, *, provides: Iterable[str] = (), status: str = "exit 0") -> Path:
    """What apt-get was asked for."""
    text = APT.format(place=place, provides=" ".join(provides), says="echo 17.0.6", status=status)
    written(place / "apt-get", text)
    written(place / "id", "#!/bin/sh\necho 0\n")
    written(place / "sleep", "#!/bin/sh\n")
    written(place / "chmod", f'#!/bin/sh\n{shutil.which("chmod")} "$@"\n')
    return place / "apt"


def ask(place: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    bash = shutil.which("bash")
    assert bash is not None
    return subprocess.run(
        [bash, str(SCRIPT), *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": str(place), **environment},
        check=False,
    )


def test_everything_is_named_with_its_packages_and_its_purpose(place: Path) -> None:
    table = [line.split("\t") for line in ask(place, "--list").stdout.splitlines()]
    states = {name: state for name, state, _, _ in table}
    assert states == {
        **dict.fromkeys(("make", "gcc", "g++", "python3"), "here"),
        **dict.fromkeys(("clang", "libfuzzer", "openssl", "systemd-analyze", "aarch64"), "missing"),
    }
    packages = {package for _, _, names, _ in table for package in names.split()}
    assert set(aarch64.PACKAGES.values()) <= packages
    assert "libclang-rt-17-dev" in packages, "of the clang that would be installed"
    assert all(purpose for _, _, _, purpose in table)


def test_what_is_left_out_is_named_with_the_command_to_get_it(place: Path) -> None:
    lines = ask(place, "--missing").stdout.splitlines()
    assert len(lines) == 5
    assert all(line.startswith("SKIPPED ") and "To have it: apt-get install " in line for line in lines)
    without = ask(place, "--has", "openssl")
    assert without.returncode == 1
    assert without.stdout.endswith("To have it: apt-get install openssl\n")
    there = ask(place, "--has", "gcc")
    assert (there.returncode, there.stdout, there.stderr) == (0, "", "")
    assert ask(place, "--has", "abacus").returncode == 2
    assert "--missing" in ask(place, "--what").stderr


def test_who_may_not_install_is_told_and_goes_on(place: Path) -> None:
    asked = apt(place)
    written(place / "id", "#!/bin/sh\necho 1000\n")
    for environment in ({}, {"KVXFER_SYSTEM_PACKAGES": "keep"}):
        told = ask(place, **environment)
        assert told.returncode == 0
        assert told.stdout == ask(place, "--missing").stdout
        written(place / "id", "#!/bin/sh\necho 0\n")
    assert not asked.exists()


def test_root_installs_what_is_missing_and_says_so_in_one_line(place: Path) -> None:
    asked = apt(place, provides=("openssl", "clang", "systemd-analyze"))
    told = ask(place)
    assert told.returncode == 0
    assert told.stdout.startswith("== root, and apt-get is here: installing binutils-aarch64-linux-gnu clang ")
    assert "openssl" in told.stdout.splitlines()[0]
    update, install = asked.read_text().splitlines()[:2]
    assert update == "update -qq"
    assert "--no-install-recommends" in install
    assert install.endswith("openssl qemu-user systemd")
    left = ask(place, "--missing").stdout
    assert "SKIPPED aarch64" in left
    assert "SKIPPED openssl" not in left


def test_a_mirror_that_fails_ends_nothing(place: Path) -> None:
    asked = apt(place, status="exit 100")
    told = ask(place)
    assert told.returncode == 0
    assert asked.read_text().count("update") == 3
    assert "not all could be installed" in told.stdout
    assert "SKIPPED openssl" in told.stdout


def test_where_all_is_here_it_says_nothing(place: Path) -> None:
    if any(missing(tool) for tool in ("clang", "libfuzzer", "openssl", "systemd-analyze", "aarch64")):
        pytest.skip("not all is here")
    told = subprocess.run([str(SCRIPT)], capture_output=True, text=True, timeout=60, check=False)
    assert (told.returncode, told.stdout, told.stderr) == (0, "", "")
