"""What the built extension asks of others; that our C++ file is the same for both string ABIs and both compilers."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from kvxfer.native import _shim
from tests.native.ascend_fakes import HIXL, HIXL_9_1, STRINGS
from tests.system import needs

NATIVE = Path(_shim.__file__).parent
BUILT = NATIVE / f"_shim{sysconfig.get_config_var('EXT_SUFFIX')}"
SOURCE = NATIVE / "ascend" / "ascend_hixl.cc"
COMPILERS = [
    pytest.param("g++", marks=needs("g++")),
    pytest.param("clang++", marks=needs("clang")),
]
VENDOR = re.compile(r"4hixl|2ge12|\bacl|Hccl|Hcomm|ascend|cann|metadef", re.IGNORECASE)


def listing(*options: str) -> list[str]:
    run = subprocess.run(["nm", *options, BUILT], capture_output=True, text=True, check=True)
    return [line.split()[-1] for line in run.stdout.splitlines() if line.strip()]


def test_no_symbol_of_the_vendor_is_undefined() -> None:
    undefined = listing("-D", "--undefined-only")
    assert any(name.startswith("dlsym") for name in undefined)
    assert [name for name in undefined if VENDOR.search(name)] == []


def test_no_library_of_the_vendor_is_linked() -> None:
    run = subprocess.run(["readelf", "-d", BUILT], capture_output=True, text=True, check=True)
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", run.stdout))
    assert "libstdc++.so.6" in needed, "exceptions unwind through both sides only when they share one libstdc++"
    assert {name for name in needed if VENDOR.search(name)} == set()


def test_the_names_are_the_vendors_letter_by_letter() -> None:
    """The preprocessor glues them together from parts; here they are whole."""
    run = subprocess.run(["strings", "-n", "8", BUILT], capture_output=True, text=True, check=True)
    ours = {line for line in run.stdout.splitlines() if line.startswith(("_ZN4hixl4Hixl", "_ZN2ge", "_ZNK2ge"))}
    assert ours == {*HIXL.values(), *HIXL_9_1.values(), *STRINGS.values()}


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("string_abi", [0, 1])
def test_the_file_compiles_with_either_string_abi(compiler: str, string_abi: int, tmp_path: Path) -> None:
    """The layouts in it are static assertions, so compiling is the test. No std::string may cross the border."""
    target = tmp_path / "hixl.o"
    warnings = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror"]
    command = [
        compiler,
        "-std=c++17",
        f"-D_GLIBCXX_USE_CXX11_ABI={string_abi}",
        "-fvisibility=hidden",
        "-fPIC",
        *warnings,
    ]
    subprocess.run([*command, "-I", NATIVE, "-c", SOURCE, "-o", target], check=True)
    symbols = subprocess.run(["nm", target], capture_output=True, text=True, check=True).stdout
    assert "__cxx11" not in symbols
    assert "basic_string" not in symbols


@pytest.mark.parametrize(("name", "size", "wrong"), [("Mem", 144, 136), ("Op", 24, 32), ("Args", 128, 64)])
def test_a_wrong_layout_does_not_compile(name: str, size: int, wrong: int, tmp_path: Path) -> None:
    text = SOURCE.read_text()
    assertion = f"sizeof({name}) == {size}"
    assert assertion in text
    copy = tmp_path / "hixl.cc"
    copy.write_text(text.replace(assertion, f"sizeof({name}) == {wrong}"))
    run = subprocess.run(
        ["g++", "-std=c++17", "-fsyntax-only", "-I", NATIVE, copy], capture_output=True, text=True, check=False
    )
    assert run.returncode != 0
    assert "assert" in run.stderr


def test_layouts_as_python_sees_them() -> None:
    ffi = _shim.ffi
    assert ffi.sizeof("kvx_ascend_op") == 24
    assert [ffi.offsetof("kvx_ascend_op", name) for name in ("local", "remote", "length")] == [0, 8, 16]
    assert ffi.sizeof("kvx_ascend_copy") == 24
