"""The libraries for Ascend cards as this process finds them: where it looks, in which order, and what it says when a
piece is missing or misbehaves. Each case is a process of its own, as the libraries load once in each.

The stand-ins of `ascend_fakes` do next to nothing; `test_ascend_table.py` drives the whole table over the simulator.
"""

from __future__ import annotations

import platform
import re
import shutil
from pathlib import Path

import pytest

from kvxfer.native import ascend
from kvxfer.native._shim import lib
from kvxfer.native.status import StatusCode
from tests.native import ascend_fakes as fakes
from tests.native.ascend_fakes import ACL, HIXL, HIXL_9_1, STRINGS, child

MACHINE = "aarch64" if platform.machine() == "aarch64" else "x86_64"
PROBE = "from kvxfer.native import ascend; found = ascend.probe(); print(type(found).__name__); print(repr(found))"

# -- statuses ---------------------------------------------------------------------------------------------------------

TABLE = {
    StatusCode.OK: [0],
    StatusCode.INVALID: [103900, 100000, 107000],
    StatusCode.TIMEOUT: [103901, 507046, 507047, 107019, 107020],
    StatusCode.PEER_LOST: [103902],
    StatusCode.BUSY: [103903],
    StatusCode.UNSUPPORTED: [103905, 207000, 200001, 200006],
    StatusCode.AGAIN: [203900, 207005],
    StatusCode.DEVICE_MEMORY: [207001, 200000],
    StatusCode.NO_CONTEXT: [107002],
    StatusCode.NO_DEVICE: [107001, 207004],
    StatusCode.DEVICE: [507000, 507053, 507055, 507056, 507899, 507999],
    StatusCode.LINK: [503900, 1, 99, 103904, 506999, 508000, 0x7FFF0001, 0xFFFFFFFF],
}


@pytest.mark.parametrize(("ours", "raw"), [(ours, raw) for ours, numbers in TABLE.items() for raw in numbers])
def test_vendor_statuses_in_our_words(ours: StatusCode, raw: int) -> None:
    assert lib.kvx_ascend_status(raw) == ours


def test_which_statuses_end_a_link() -> None:
    kind = [0, 103900, 103902, 103903, 103905, 203900]
    assert [raw for raw in kind if lib.kvx_ascend_latches(raw)] == []
    assert all(
        lib.kvx_ascend_latches(raw) for raw in (103901, 103904, 503900, 507055, 107002, 207005, 12345, 0x7FFF0001)
    )


def test_an_error_carries_the_vendors_number_and_text() -> None:
    error = ascend.vendor_error(StatusCode.DEVICE_MEMORY, 207001, what="alloc", said="no huge page", device=3)
    assert error.fields == {"device": 3, "vendor_status": 207001, "vendor_says": "no huge page"}
    assert "alloc: " in str(error)


# -- where it looks ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five libraries that make a probe succeed."""
    return fakes.toolkit(tmp_path_factory.mktemp("toolkit"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of them that a test may spoil."""
    return Path(shutil.copytree(whole, tmp_path / "lib64"))


def facts(**environment: str) -> str:
    kind, text = child(PROBE, **environment).splitlines()
    assert kind == "AscendInfo", text
    return text


def reason(**environment: str) -> str:
    kind, text = child(PROBE, **environment).splitlines()
    assert kind == "AscendMissing", text
    return text


def test_a_plain_host_says_where_it_looked_and_what_to_do() -> None:
    text = reason(ASCEND_HOME_PATH="/nowhere/cann")
    for place in (
        *("/nowhere/cann/lib64/libcann_hixl.so", "/nowhere/cann/x86_64-linux/lib64/libcann_hixl.so"),
        *("/usr/local/Ascend/cann/lib64/", "/usr/local/Ascend/ascend-toolkit/latest/lib64/"),
        *("libacl_rt.so: cannot open shared object file", "libascendcl.so: cannot open", "set_env.sh"),
    ):
        assert place.replace("x86_64", MACHINE) in text


def test_the_named_directory(whole: Path) -> None:
    text = facts(KVXFER_CANN_LIBDIR=str(whole))
    assert f"acl_path='{whole}/libacl_rt.so'" in text
    assert f"meta_path='{whole}/libmetadef.so'" in text
    assert f"hixl_path='{whole}/libcann_hixl.so'" in text
    assert "soc='Fake910'" in text
    assert "simulated=False" in text
    assert "devices=2" in text


def test_a_named_directory_is_the_only_one(whole: Path, tmp_path: Path) -> None:
    home = tmp_path / "cann"
    home.mkdir()
    (home / "lib64").symlink_to(whole)
    text = reason(KVXFER_CANN_LIBDIR=str(tmp_path / "empty"), ASCEND_HOME_PATH=str(home))
    assert f"{tmp_path}/empty/libcann_hixl.so: not there" in text
    assert str(home) not in text
    assert "/usr/local/Ascend" not in text


@pytest.mark.parametrize("below", ["lib64", f"{MACHINE}-linux/lib64"])
def test_the_toolkits_own_variable(below: str, whole: Path, tmp_path: Path) -> None:
    target = tmp_path / "cann" / below
    target.parent.mkdir(parents=True)
    target.symlink_to(whole)
    assert f"acl_path='{target}/libacl_rt.so'" in facts(ASCEND_HOME_PATH=str(tmp_path / "cann"))


def test_an_old_toolkit_without_hixl_is_passed_over(whole: Path, tmp_path: Path) -> None:
    """Its ACL would stay in the process and not fit the newer HIXL."""
    home = tmp_path / "cann"
    shutil.copytree(whole, home / "lib64")
    (home / "lib64" / "libcann_hixl.so").unlink()
    (home / f"{MACHINE}-linux").mkdir()
    (home / f"{MACHINE}-linux" / "lib64").symlink_to(whole)
    text = facts(ASCEND_HOME_PATH=str(home))
    assert f"acl_path='{home}/{MACHINE}-linux/lib64/libacl_rt.so'" in text


def test_older_names_of_libraries(tmp_path: Path) -> None:
    old = fakes.toolkit(tmp_path / "old", acl_name="libascendcl.so", meta_name="libgraph.so")
    text = facts(KVXFER_CANN_LIBDIR=str(old))
    assert "libascendcl.so'" in text
    assert "libgraph.so'" in text


def test_the_loaders_own_path(whole: Path) -> None:
    assert f"hixl_path='{whole}/libcann_hixl.so'" in facts(LD_LIBRARY_PATH=str(whole))


def loaded_before(library: Path) -> str:
    return f"import ctypes; ctypes.CDLL({str(library)!r}); {PROBE}"


def test_what_the_process_has_loaded_is_taken(whole: Path, folder: Path) -> None:
    """A framework was first: its ACL is the only one, and HIXL comes from the same directory."""
    kind, text = child(loaded_before(whole / "libacl_rt.so"), ASCEND_HOME_PATH=str(folder.parent)).splitlines()
    assert kind == "AscendInfo", text
    assert f"acl_path='{whole}/libacl_rt.so'" in text
    assert f"hixl_path='{whole}/libcann_hixl.so'" in text


def test_two_acls_in_one_process_are_refused(whole: Path, folder: Path) -> None:
    kind, text = child(loaded_before(whole / "libacl_rt.so"), KVXFER_CANN_LIBDIR=str(folder)).splitlines()
    assert kind == "AscendMissing"
    assert f"has loaded {whole}/libacl_rt.so already" in text
    assert "unset the variable" in text


# -- what is missing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["libacl_rt.so", "libmetadef.so", "libcann_hixl.so"])
def test_a_missing_library(name: str, folder: Path) -> None:
    (folder / name).unlink()
    text = reason(KVXFER_CANN_LIBDIR=str(folder))
    assert f"{folder}/{name}: not there" in text
    assert "set_env.sh" in text


def test_a_broken_library_is_named_with_the_loaders_words(folder: Path) -> None:
    (folder / "libacl_rt.so").write_bytes(b"no ELF")
    text = reason(KVXFER_CANN_LIBDIR=str(folder))
    assert f"{folder}/libacl_rt.so: {folder}/libacl_rt.so: file too short" in text


WEAK = ("libhcomm.so", "liberror_manager.so")
WITH_C = [*HIXL.values(), "HixlCSServerCreate"]


@pytest.mark.parametrize("absent", WEAK)
@pytest.mark.parametrize("there", [False, True])
def test_a_library_behind_weak_references_must_be_loaded(absent: str, there: bool, tmp_path: Path) -> None:
    """HIXL loads without it, and a call would jump to address 0; that its file is there does not help."""
    kept = tuple(name for name in WEAK if name != absent)
    folder = fakes.toolkit(tmp_path / "lib", weak=kept, hixl=WITH_C)
    if there:
        fakes.build("", folder / absent)
    text = reason(KVXFER_CANN_LIBDIR=str(folder))
    assert f"{absent} is not loaded" in text
    assert f"{kept[0]} is not loaded" not in text


@pytest.mark.parametrize("there", [False, True])
def test_the_oldest_toolkit_loads_one_of_them_later(there: bool, tmp_path: Path) -> None:
    folder = fakes.toolkit(tmp_path / "lib", weak=WEAK[1:])
    if there:
        fakes.build("", folder / WEAK[0])
        assert "toolkit='8.5'" in facts(KVXFER_CANN_LIBDIR=str(folder))
    else:
        assert f"{folder}/libhcomm.so: not there" in reason(KVXFER_CANN_LIBDIR=str(folder))


def test_missing_symbols_are_listed(tmp_path: Path) -> None:
    names = [name for name in HIXL.values() if name not in (HIXL["Connect"], HIXL["Finalize"])]
    acl = [name for name in ACL if name != "aclrtMemcpy"]
    folder = fakes.toolkit(tmp_path / "lib", hixl=names, acl=acl, strings=list(STRINGS.values())[1:])
    text = reason(KVXFER_CANN_LIBDIR=str(folder))
    assert "libacl_rt.so lacks aclrtMemcpy. " in text
    for name in (HIXL["Connect"], HIXL["Finalize"], STRINGS["C1EPKc"]):
        assert name in text
    assert "8.5 or newer" in text
    assert HIXL["Disconnect"] not in text


@pytest.mark.parametrize(
    ("more", "toolkit", "flags"),
    [
        ((), "8.5", "async_connect=False, bulk_status=False, capability=False"),
        (("HixlCSServerCreate",), "9.0", "async_connect=False, bulk_status=False, capability=False"),
        (("HixlCSServerCreate", *HIXL_9_1.values()), "9.1+", "async_connect=True, bulk_status=True, capability=True"),
    ],
)
def test_the_toolkit_is_judged_by_symbols(more: tuple[str, ...], toolkit: str, flags: str, tmp_path: Path) -> None:
    text = facts(KVXFER_CANN_LIBDIR=str(fakes.toolkit(tmp_path / "lib", hixl=[*HIXL.values(), *more])))
    assert f"toolkit='{toolkit}'" in text
    assert flags in text


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        ("aclInit", "int aclInit(void) { return 507899; }", "aclInit of .* answered 507899"),
        ("aclrtGetDeviceCount", "int aclrtGetDeviceCount(unsigned *n) { return 107001; }", "answered 107001"),
        ("aclrtGetDeviceCount", "int aclrtGetDeviceCount(unsigned *n) { *n = 0; return 0; }", "and no device"),
    ],
)
def test_libraries_without_a_card(name: str, body: str, words: str, tmp_path: Path) -> None:
    text = reason(KVXFER_CANN_LIBDIR=str(fakes.toolkit(tmp_path / "lib", acl_bodies={name: body})))
    assert re.search(words, text), text
    assert "/dev/davinci*" in text


def test_another_user_of_the_library_was_first(tmp_path: Path) -> None:
    """aclInit says so, and all is well."""
    folder = fakes.toolkit(tmp_path / "lib", acl_bodies={"aclInit": "int aclInit(void) { return 100002; }"})
    facts(KVXFER_CANN_LIBDIR=str(folder))


def test_once_per_process_whatever_happens_later(folder: Path) -> None:
    code = f"""
import shutil
from concurrent.futures import ThreadPoolExecutor
from kvxfer.native import ascend
from kvxfer.native._shim import lib
with ThreadPoolExecutor(8) as pool:
    found = set(pool.map(lambda _: repr(ascend.probe()), range(64)))
assert len(found) == 1, found
shutil.rmtree({str(folder)!r})
assert repr(ascend.probe()) in found
print("well")
"""
    assert child(code, KVXFER_CANN_LIBDIR=str(folder)) == "well\n"


def test_a_failed_search_is_remembered(folder: Path, tmp_path: Path) -> None:
    code = f"""
import os
from kvxfer.native import ascend
from kvxfer.native._shim import lib
first = ascend.probe()
os.rename({str(folder)!r}, {str(tmp_path / "late")!r})
assert ascend.probe() == first
print(type(first).__name__)
"""
    assert child(code, KVXFER_CANN_LIBDIR=str(tmp_path / "late")) == "AscendMissing\n"


def test_a_forked_child_is_told_to_start_anew(whole: Path) -> None:
    code = """
import os
from kvxfer.native import ascend
from kvxfer.native._shim import lib
assert isinstance(ascend.probe(), ascend.AscendInfo)
pid = os.fork()
if pid == 0:
    found = ascend.probe()
    os._exit(0 if isinstance(found, ascend.AscendMissing) and "spawn" in found.reason else 1)
print(os.waitpid(pid, 0)[1])
"""
    assert child(code, KVXFER_CANN_LIBDIR=str(whole)) == "0\n"


# -- what it throws ---------------------------------------------------------------------------------------------------


def thrower() -> str:
    """HIXL in C++ whose members throw: a standard exception, or a number, which is no exception class at all."""
    text = '#include <stdexcept>\nextern "C" {\n'
    thrown = {"Connect": 'throw std::runtime_error("the cable is out")', "Disconnect": "throw 7"}
    thrown |= {"C1Ev": 'if (getenv("THROW_EARLY")) throw std::runtime_error("no room")'}
    thrown |= {"Finalize": 'throw std::logic_error("too late")', "D1Ev": "throw 8"}
    for key, name in HIXL.items():
        label = f"f{len(text)}"
        text += f'unsigned {label}(void) __asm__("{name}");\n'
        text += f"unsigned {label}(void) {{ {thrown.get(key, '')}; return 0; }}\n"
    return "#include <stdlib.h>\n" + text + "}\n"


CALLS = """
from kvxfer.native._shim import ffi, lib
table = lib.kvx_ascend_get(ffi.NULL, 0)
assert table != ffi.NULL
raw, engine, why = ffi.new("uint32_t *"), ffi.new("void **"), ffi.new("char[256]")
def text(): return ffi.string(table.last_error()).decode()
def said(): return ffi.string(why).decode()
"""


def test_exceptions_of_the_library_become_statuses(tmp_path: Path) -> None:
    code = (
        CALLS
        + """
assert table.engine_open(0, b"127.0.0.1:9", ffi.NULL, 0, engine, raw, why, 256) == 0, said()
assert table.connect(engine[0], b"127.0.0.1:8", 1000, raw) == 207
assert raw[0] == 0x7fff0001
assert text() == "an exception came out of the HIXL library: the cable is out"
assert text() == ""
assert table.disconnect(engine[0], b"127.0.0.1:8", 1000, ffi.NULL) == 207
assert text() == "an exception came out of the HIXL library: of an unknown type"
assert table.engine_close(engine[0], raw) == 207
assert "too late" in text()
print("well")
"""
    )
    folder = fakes.toolkit(tmp_path / "lib", hixl_source=thrower())
    assert child(code, KVXFER_CANN_LIBDIR=str(folder)) == "well\n"
    early = (
        CALLS
        + """
assert table.engine_open(0, b"127.0.0.1:9", ffi.NULL, 0, engine, raw, why, 256) == 207
assert "no room" in said() and raw[0] == 0x7fff0001, said()
print("well")
"""
    )
    assert child(early, KVXFER_CANN_LIBDIR=str(folder), THROW_EARLY="1") == "well\n"


# -- what is refused before the library sees it -----------------------------------------------------------------------

ADDRESSES = {
    "127.0.0.1": 0,
    "127.0.0.1:1": 0,
    "10.0.0.1:65535": 0,
    "[::1]": 0,
    "[fe80::1]:20000": 0,
    "127.0.0.1:0": 2,
    "127.0.0.1:65536": 2,
    "127.0.0.1:99999": 2,
    "127.0.0.1:-1": 2,
    "127.0.0.1:+5": 2,
    "127.0.0.1:5x": 2,
    "127.0.0.1:": 2,
    "[::1]:0": 2,
    "[::1": 2,
    "[]:5": 2,
    "[::1]5": 2,
    "::1": 2,
    ":5": 2,
    "": 2,
}


def test_addresses_and_arguments(whole: Path) -> None:
    code = (
        CALLS
        + f"""
for address, expected in {ADDRESSES!r}.items():
    status = table.engine_open(0, address.encode(), ffi.NULL, 0, engine, raw, why, 256)
    assert status == expected, (address, status, said())
    assert (said() == "") == (status == 0), address
    if status == 0:
        last = engine[0]
assert table.engine_open(2, b"127.0.0.1", ffi.NULL, 0, engine, raw, why, 256) == 307
assert table.engine_open(-1, b"127.0.0.1", ffi.NULL, 0, engine, raw, why, 256) == 307
handle, MIB = ffi.new("void **"), 1 << 20
at = lambda address: ffi.cast("void *", address)
assert table.mem_register(last, at(2 * MIB), 2 * MIB, lib.KVX_ASCEND_DEVICE, handle, raw) == 0
for address, length in ((MIB, 2 * MIB), (2 * MIB, MIB), (2 * MIB + 1, 2 * MIB)):
    assert table.mem_register(last, at(address), length, lib.KVX_ASCEND_DEVICE, handle, raw) == 5
    assert table.mem_register(last, at(address), length, lib.KVX_ASCEND_HOST, handle, raw) == 0
assert table.mem_register(last, at(0), MIB, lib.KVX_ASCEND_HOST, handle, raw) == 2
assert table.mem_register(last, at(MIB), 0, lib.KVX_ASCEND_HOST, handle, raw) == 2
assert table.mem_register(last, at(MIB), 1, lib.KVX_ASCEND_FOREIGN, handle, raw) == 2
assert table.connect(last, b"", 1000, raw) == 2
assert table.connect(last, b"127.0.0.1:5", 0, raw) == 2
assert table.submit(last, b"127.0.0.1:5", True, ffi.NULL, 0, handle, raw) == 2
value = ffi.new("int32_t *")
assert table.capability(1, value, raw) == 304
assert table.engine_close(last, raw) == 0
assert table.engine_close(last, raw) == 13, "twice"
assert table.connect(last, b"127.0.0.1:5", 1000, raw) == 13, "too late"
assert table.engine_close(ffi.NULL, raw) == 2
print("well")
"""
    )
    assert child(code, KVXFER_CANN_LIBDIR=str(whole)) == "well\n"


@pytest.mark.parametrize(("cs", "known"), [((), False), (("HixlCSServerCreate",), True)])
def test_options_that_the_toolkit_does_not_know(cs: tuple[str, ...], known: bool, tmp_path: Path) -> None:
    folder = fakes.toolkit(tmp_path / "lib", hixl=[*HIXL.values(), *cs])
    code = (
        CALLS
        + f"""
def open(key, value):
    keep = [ffi.new("char[]", key), ffi.new("char[]", value)]
    option = ffi.new("kvx_ascend_option *", {{"key": keep[0], "value": keep[1]}})
    return table.engine_open(0, b"127.0.0.1", option, 1, engine, raw, why, 256)
assert open(b"BufferPool", b"4:8") == 0
assert open(b"RdmaTrafficClass", b"132") == 0
assert open(b"AutoConnect", b"1") == (0 if {known} else 2), said()
assert {known} or ('"AutoConnect"' in said() and "8.5" in said()), said()
assert open(b"Bufferpool", b"4:8") == 2
assert '"Bufferpool"' in said(), said()
print("well")
"""
    )
    assert child(code, KVXFER_CANN_LIBDIR=str(folder)) == "well\n"
