"""The house rules hold for the whole tree, and each of them can fail.

The import map below is the architecture: layers in order, every module in exactly one. A new module belongs in it.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import source_rules as rules
from tests.source_rules import Layer

ROOT = Path(__file__).resolve().parent.parent

LAYERS = (
    Layer(
        name="facts",
        modules=(
            *("errors", "descriptors", "addresses"),
            *("net", "daemon", "memory", "dataplane", "flows"),  # the packages themselves: a docstring each
        ),
        pure=True,
    ),
    Layer(
        name="limits",
        modules=("logs", "config", "config.*", "net.tls", "net.credentials", "net.forks", "memory.numa", "tasks"),
    ),
    Layer(
        name="decisions",
        modules=(
            *("geometry", "coverage", "planner", "block_parts", "wire", "wire.*", "rendezvous", "rendezvous.*"),
            *("memory.footprint", "memory.reservations", "dataplane.admission", "doctor.facts"),
        ),
        pure=True,
    ),
    Layer(name="native", modules=("native", "native.*")),
    Layer(name="control connections", modules=("net.dial", "net.link", "net.listeners")),
    Layer(
        name="memory and transfers",
        modules=(
            *("memory.allocation", "memory.region", "memory.sources"),
            *(f"dataplane.{name}" for name in ("connections", "exports", "plane", "quiet", "transfer")),
        ),
    ),
    Layer(name="daemon", modules=("daemon.*", "server")),
    Layer(name="client", modules=("client", "flows.*")),
    Layer(name="embedded", modules=("embedded",)),
    Layer(name="threaded", modules=("threaded",)),
    Layer(
        name="doctor",
        modules=(
            "doctor",
            *(f"doctor.{name}" for name in ("accelerator", "ascend", "host", "network", "program", "report")),
        ),
    ),
    Layer(name="bench", modules=("bench", "bench.*")),
    Layer(name="front", modules=("__init__", "__main__", "cli", "cli.*", "integrations", "integrations.*")),
)
SHIM_IMPORTERS = {f"kvxfer.native.{name}" for name in ("engine", "status", "ascend")}
# Who may start a task outside a TaskGroup. Besides the one owner: calls whose work is shielded, so that it outlives a
# cancelled caller, ends by its own deadline and is then cleaned up by a callback.
TASK_OWNERS = {"kvxfer.tasks", *(f"kvxfer.flows.{name}" for name in ("control", "publish", "push"))}

# Test files that stand for more than one module, or for something that is not one.
TESTS_OF_MORE = (
    *("test_sourcecode.py", "test_deploy.py", "test_build.py", "test_docs.py", "test_ascend_flows.py"),
    "dataplane/test_addresses.py",  # several of one owner: reach and race
    "tools/test_system_packages.py",  # of a script that is no module
    *("test_planner_ranks.py", "flows/test_ranks.py", "integrations/test_real_model.py"),
    "integrations/vllm/engines/",
    *(
        "adversity/",
        "cases/",
        "fuzz/",
        "support/",
        "sim/",
        "native/sanitize/",
        "native/fuzz/",
        "native/test_conformance.py",
        "native/test_frames.py",
        "native/test_fuzz.py",
        "native/test_mutants.py",
        "native/test_ascend_abi.py",
        "native/test_ascend_sim.py",
        "native/test_ascend_sim_links.py",
        "native/test_ascend_table.py",
        "native/test_endings.py",
        "wire/test_versions.py",
    ),
)


def tracked() -> list[str]:
    """Files of the project, relative to its root: what git tracks, or all but the ignored when this is no checkout."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode == 0:
        return sorted(path for path in listing.stdout.splitlines() if (ROOT / path).is_file())
    ignored = {".venv", ".bench-peers", "build", "dist", "__pycache__", ".git"}
    every = (path for path in ROOT.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(ROOT)) for path in every if not ignored & set(path.relative_to(ROOT).parts))


FILES = tracked()
PYTHON = [path for path in FILES if path.endswith(".py")]
PACKAGE = [path for path in PYTHON if path.startswith("kvxfer/")]
# What a user of the library calls: the classes of the front door, by module.
FRONT_DOOR = {
    "kvxfer/client.py": ("Client", "ClientLife", "Peer"),
    "kvxfer/threaded.py": ("ThreadedClient", "Handle", "PostedHandle", "PushHandle"),
    "kvxfer/server.py": ("Server",),
    "kvxfer/flows/offer.py": ("Landing",),
    "kvxfer/flows/push.py": ("Push",),
    "kvxfer/flows/publish.py": ("Publication",),
    "kvxfer/flows/adopt.py": ("Adoption",),
    "kvxfer/flows/mail.py": ("Notifications", "Share"),
    "kvxfer/flows/many.py": ("Group",),
    "kvxfer/dataplane/transfer.py": ("Transfer",),
    "kvxfer/memory/region.py": ("Region", "Span", "KVCache"),
    "kvxfer/geometry.py": ("Geometry", "BlockTable", "CacheLayout"),
    "kvxfer/descriptors.py": ("RemoteDescriptor", "Ticket"),
}
GENERATOR_INPUT = "kvxfer/native/api.csrc.c"  # copied into the generated file as it is
C_FILES = [path for path in FILES if path.endswith((".c", ".h", ".cc"))]


def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


TREES = {path: ast.parse(text_of(path), path) for path in PYTHON}


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def root_module(path: str) -> str:
    return "kvxfer.__init__" if path == "kvxfer/__init__.py" else module_of(path)


MODULES = {root_module(path) for path in PACKAGE}


def none_wrong(found: list[str]) -> None:
    assert not found, "\n".join(["", *found])


# -- the tree ---------------------------------------------------------------------------------------------------------


def test_there_is_something_to_check() -> None:
    assert len(PACKAGE) > 10
    assert len(C_FILES) > 5


def test_import_map() -> None:
    found = []
    for path in PACKAGE:
        package = path.endswith("/__init__.py")
        found += rules.import_map(path, TREES[path], root_module(path), MODULES, LAYERS, is_package=package)
    none_wrong(found)


def test_layers_do_not_overlap() -> None:
    for module in MODULES:
        holders = [layer.name for layer in LAYERS if layer.holds(rules.strip_root(module))]
        assert len(holders) <= 1, (module, holders)


def test_no_import_cycles() -> None:
    graph = {}
    for path in PACKAGE:
        names = rules.import_time_imports(TREES[path], module_of(path), is_package=path.endswith("/__init__.py"))
        graph[root_module(path)] = (names & MODULES) - {root_module(path)}
    none_wrong(rules.import_cycles(graph))


def test_few_modules_import_the_shim() -> None:
    found = []
    for path in PACKAGE:
        package = path.endswith("/__init__.py")
        found += rules.shim_imports(path, TREES[path], module_of(path), SHIM_IMPORTERS, is_package=package)
    none_wrong(found)


CARD = {
    "kvxfer/client.py": "class Client(",
    "kvxfer/server.py": "class Server:",
    "pyproject.toml": "[project]",
}


def test_the_fixed_paths_hold_what_they_are_named_for() -> None:
    """Users, and the project's own description, rely on these places: real classes, and no re-exports of others."""
    for path, wanted in CARD.items():
        assert wanted in text_of(path), path
    assert any(path.startswith("kvxfer/native/") for path in C_FILES)
    assert any(path.startswith("deploy/") for path in FILES)


def test_the_client_library_does_not_import_the_daemon() -> None:
    for path in PACKAGE:
        if path == "kvxfer/client.py" or path.startswith("kvxfer/flows/"):
            names = {name for _, name in rules.imports(TREES[path], module_of(path))}
            assert not {name for name in names if name.startswith(("kvxfer.daemon", "kvxfer.server"))}, path


def test_banned_calls() -> None:
    found = []
    for path in PACKAGE:
        found += rules.banned_calls(path, TREES[path], task_owner=module_of(path) in TASK_OWNERS)
    none_wrong(found)


def test_no_swallowed_errors() -> None:
    # These two keep what they caught, whatever it was, and look at it: that is what they test.
    keepers = {"tests/adversity/test_ends.py", "tests/steps.py"}
    shipped = [path for path in PYTHON if path not in keepers]
    none_wrong([wrong for path in shipped for wrong in rules.swallowed_errors(path, TREES[path])])


def test_no_condition_on_the_name_of_a_transport() -> None:
    none_wrong([wrong for path in PACKAGE for wrong in rules.transport_conditions(path, TREES[path])])


def test_sizes() -> None:
    found = [wrong for path in PYTHON for wrong in rules.python_sizes(path, text_of(path), TREES[path])]
    found += [wrong for path in C_FILES for wrong in rules.c_sizes(path, text_of(path))]
    none_wrong(found)


def test_names_of_native_functions() -> None:
    texts = {path: text_of(path) for path in C_FILES if path.startswith("kvxfer/native/") and path != GENERATOR_INPUT}
    found = [name for text in texts.values() for _, name, _ in rules.c_definitions(text)]
    assert len(found) > 800, "the definitions are found"
    none_wrong([wrong for path, text in texts.items() for wrong in rules.c_names(path, text)])
    none_wrong(rules.c_names_twice(texts))
    none_wrong([wrong for path, text in texts.items() for wrong in rules.c_includes(path, text)])


def test_every_file_says_what_it_is_for() -> None:
    spoken = [path for path in [*PYTHON, *C_FILES] if path != GENERATOR_INPUT]
    none_wrong([wrong for path in spoken for wrong in rules.says_what_it_is_for(path, text_of(path))])


def test_a_class_name_is_defined_in_one_module() -> None:
    none_wrong(rules.class_names_twice({path: text_of(path) for path in PACKAGE}))


def test_the_front_door_says_what_it_raises() -> None:
    for path, classes in FRONT_DOOR.items():
        there = {node.name for node in ast.walk(TREES[path]) if isinstance(node, ast.ClassDef)}
        assert there.issuperset(classes), f"{path}: a class of the front door has gone"
        none_wrong(rules.errors_not_named(path, TREES[path], classes))


def test_files_that_prose_names_exist() -> None:
    there = {path.rpartition("/")[2] for path in FILES} | {"_shim.c"}  # that one is generated
    prose = [path for path in FILES if path.startswith(("kvxfer/", "docs/")) and not path.endswith((".toml", ".so"))]
    none_wrong([wrong for path in prose for wrong in rules.missing_files(path, text_of(path), there)])


def test_no_unfinished_work_and_no_machine_paths() -> None:
    found = []
    for path in FILES:
        try:
            text = text_of(path)
        except UnicodeDecodeError:
            continue  # a picture
        found += rules.unfinished_work(path, text) + rules.machine_paths(path, text)
    none_wrong(found)


def test_tests_mirror_modules() -> None:
    tests = [path for path in PYTHON if path.startswith("tests/") and path.rpartition("/")[2].startswith("test_")]
    none_wrong([wrong for path in tests for wrong in rules.mirrored(path, set(FILES), TESTS_OF_MORE)])


def test_no_test_was_given_up() -> None:
    tests = [path for path in PYTHON if path.startswith("tests/")]
    none_wrong([wrong for path in tests for wrong in rules.given_up_tests(path, TREES[path])])


def test_links_in_documents_lead_somewhere() -> None:
    found = []
    for path in FILES:
        if path.endswith(".md"):
            folder = (ROOT / path).parent
            found += rules.dead_links(path, text_of(path), lambda target, folder=folder: (folder / target).exists())
    none_wrong(found)


def test_mypy_has_no_exemptions() -> None:
    settings = text_of("pyproject.toml")
    assert "strict = true" in settings
    assert "mypy.overrides" not in settings
    assert "ignore_errors" not in settings


@pytest.mark.parametrize("path", [path for path in C_FILES if "/transport_" in path and path.endswith(".c")])
def test_a_transport_has_one_global_symbol(path: str, tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc") or "cc"
    target = tmp_path / "object.o"
    subprocess.run(
        [compiler, "-std=gnu11", "-O0", f"-I{ROOT}/kvxfer/native", "-c", "-o", target, ROOT / path], check=True
    )
    symbols = subprocess.run(
        ["nm", "--defined-only", "--extern-only", target], capture_output=True, text=True, check=True
    ).stdout
    name = Path(path).stem
    own = f"kvx_{name.removeprefix('transport_')}_"  # of the files that it is divided into; hidden in the extension
    expected = {f"kvx_{name}_wrap"} if name == "transport_fault" else {f"kvx_{name}"}
    assert {symbol for symbol in rules.global_symbols(symbols) if not symbol.startswith(own)} == expected


def test_the_extension_shows_one_symbol() -> None:
    """What is hidden cannot collide with another library in the process."""
    built = ROOT / "kvxfer" / "native" / f"_shim{sysconfig.get_config_var('EXT_SUFFIX')}"
    symbols = subprocess.run(["nm", "-D", "--defined-only", built], capture_output=True, text=True, check=True).stdout
    assert rules.global_symbols(symbols) == {"PyInit__shim"}


def test_public_names_have_docstrings() -> None:
    import kvxfer

    assert kvxfer.__all__, "the public names are listed in kvxfer.__all__"
    for name in kvxfer.__all__:
        thing = getattr(kvxfer, name)
        if callable(thing) or isinstance(thing, type):
            assert (thing.__doc__ or "").strip(), f"kvxfer.{name} has no docstring"


# -- the rules can fail -----------------------------------------------------------------------------------------------

SMALL_MAP = (Layer(name="low", modules=("errors", "wire.*"), pure=True), Layer(name="high", modules=("client",)))
SMALL_MODULES = {"kvxfer.errors", "kvxfer.wire.session", "kvxfer.client", "kvxfer.stray"}


def by_map(module: str) -> Callable[[str], list[str]]:
    return lambda code: rules.import_map("x.py", ast.parse(code), module, SMALL_MODULES, SMALL_MAP)


def on_tree(rule: Callable[[str, ast.AST], list[str]]) -> Callable[[str], list[str]]:
    return lambda code: rule("x.py", ast.parse(code))


def on_text(rule: Callable[[str, str], list[str]], path: str = "x.py") -> Callable[[str], list[str]]:
    return lambda code: rule(path, code)


def sizes(code: str) -> list[str]:
    return rules.python_sizes("x.py", code, ast.parse(code))


def unnamed_errors(code: str) -> list[str]:
    return rules.errors_not_named("x.py", ast.parse(code), ("Client",))


def shim(code: str) -> list[str]:
    return rules.shim_imports("x.py", ast.parse(code), "kvxfer.client", SHIM_IMPORTERS)


BAD = [
    (by_map("kvxfer.errors"), "from kvxfer.client import Client"),
    (by_map("kvxfer.errors"), "from kvxfer import client"),
    (by_map("kvxfer.errors"), "from . import client"),
    (by_map("kvxfer.wire.session"), "from ..client import Client"),
    (by_map("kvxfer.wire.session"), "def f():\n    import kvxfer.client"),
    (by_map("kvxfer.wire.session"), "import asyncio"),
    (by_map("kvxfer.errors"), "from os import environ"),
    (by_map("kvxfer.client"), "import kvxfer.stray"),
    (by_map("kvxfer.stray"), "x = 1"),
    (shim, "from kvxfer.native import _shim"),
    (shim, "from kvxfer.native._shim import lib"),
    (on_tree(rules.banned_calls), "import pickle"),
    (on_tree(rules.banned_calls), "import ctypes"),
    (on_tree(rules.banned_calls), "from marshal import loads"),
    (on_tree(rules.banned_calls), "eval('1')"),
    (on_tree(rules.banned_calls), "asyncio.create_task(f())"),
    (on_tree(rules.banned_calls), "loop.create_task(f())"),
    (on_tree(rules.banned_calls), "asyncio.ensure_future(f())"),
    (on_tree(rules.banned_calls), "import time\nasync def f():\n    time.sleep(1)"),
    (on_tree(rules.banned_calls), "if self.timer.when() < due: f()"),
    (on_tree(rules.banned_calls), "assert isinstance(transport, asyncio.Transport)"),
    (on_tree(rules.swallowed_errors), "try:\n    f()\nexcept:\n    raise"),
    (on_tree(rules.swallowed_errors), "try:\n    f()\nexcept Exception:\n    pass"),
    (on_tree(rules.swallowed_errors), "try:\n    f()\nexcept BaseException as error:\n    log(error)"),
    (on_tree(rules.transport_conditions), "if name == 'tcp':\n    f()"),
    (on_tree(rules.transport_conditions), "x = 1 if transport.is_shm else 2"),
    (on_tree(rules.transport_conditions), "match name:\n    case 'hixl':\n        f()"),
    (on_tree(rules.transport_conditions), "[t for t in all if t.name != 'fault+tcp']"),
    (sizes, "def f():\n" + "    x = 1\n" * 60),
    (sizes, "x = 1\n" * 1001),
    (on_text(rules.c_sizes, "x.c"), "int f(void) {\n" + "    g();\n" * 79 + "}\n"),
    (on_text(rules.c_sizes, "x.c"), "static void\nf(int a,\n  int b) {\n" + "    g();\n" * 79 + "}\n"),
    (on_text(rules.c_sizes, "x.c"), "int x;\n" * 1001),
    (on_text(rules.c_names, "tcp/tcp_conn.c"), "static void\ncheck(int a) {\n}\n"),
    (on_text(rules.c_names, "tcp/transport_tcp.c"), "static bool\nconn_open(int a,\n  int b) {\n}\n"),
    (on_text(rules.c_names, "tcp/tcp_conn.c"), "void kvx_open(void) {\n}\n"),
    (on_text(rules.c_names, "core/ring.h"), "static inline int ring_size(void) {\n}\n"),
    (on_text(rules.c_names, "x/load.cc"), "namespace a {\nnamespace {\nvoid take(int a) noexcept {\n}\n}\n}\n"),
    (on_text(rules.c_includes, "native/hixl/hixl_peer.c"), '#include "tcp/tcp.h"\n'),
    (lambda text: rules.c_names_twice({"a.c": text, "b.c": text}), "static int a_f(void) {\n}\n"),
    (lambda text: rules.class_names_twice({"a.py": text, "b.py": text}), "class A: ...\n"),
    (unnamed_errors, 'class Client:\n    async def put(self):\n        """Writes."""\n'),
    (unnamed_errors, 'class Client:\n    def put(self):\n        """Writes."""\n        raise UsageError("x")\n'),
    (
        unnamed_errors,
        'class Client:\n    def put(self):\n        """Writes."""\n        self._f()\n'
        "    def _f(self):\n        g()\ndef g():\n    raise UsageError()\n",
    ),
    (on_text(rules.says_what_it_is_for), "import os\n"),
    (on_text(rules.says_what_it_is_for, "x.c"), "#include <stdint.h>\n"),
    (on_text(rules.unfinished_work), "# TO" + "DO later"),
    (on_text(rules.unfinished_work), "raise NotImplemented" + "Error"),
    (lambda text: rules.missing_files("x.py", text, {"here.py"}), '"""See `dataplane/gone.py`."""'),
    (on_text(rules.machine_paths), "see /wo" + "rk/main"),
    (on_text(rules.machine_paths), "path = '/ho" + "me/someone/x'"),
    (on_tree(rules.given_up_tests), "@pytest.mark.skip\ndef test_x(): ..."),
    (on_tree(rules.given_up_tests), "pytest.xfail('later')"),
    (lambda text: rules.dead_links("x.md", text, lambda target: False), "see [this](there.md#part)"),
    (lambda path: rules.mirrored(path, {"kvxfer/errors.py"}, ()), "tests/test_other.py"),
]
GOOD = [
    (by_map("kvxfer.client"), "from kvxfer.errors import E\nimport asyncio"),
    (by_map("kvxfer.wire.session"), "from kvxfer.errors import E\nimport struct"),
    (
        on_tree(rules.banned_calls),
        "async def f():\n    async with asyncio.TaskGroup() as g:\n        g.create_task(h())",
    ),
    (on_tree(rules.swallowed_errors), "try:\n    f()\nexcept OSError:\n    pass"),
    (on_tree(rules.swallowed_errors), "try:\n    f()\nexcept BaseException:\n    g()\n    raise"),
    (on_tree(rules.transport_conditions), "if transport.same_host:\n    f('tcp')"),
    (sizes, "def f():\n" + "    x = 1\n" * 59),
    (on_text(rules.c_sizes, "x.c"), "int f(void) {\n" + "    g();\n" * 78 + "}\n"),
    (on_text(rules.c_sizes, "x.c"), "static const int table[] = {\n" + "    1,\n" * 100 + "};\n"),
    (
        on_text(rules.c_names, "tcp/tcp_conn.c"),
        "static void tcp_conn_f(void) {\n    if (x) {\n    }\n}\nint kvx_tcp_f(int a) {\n}\n",
    ),
    (on_text(rules.c_names, "tcp/transport_tcp.c"), "__attribute__((cold)) static bool tcp_open(int a) {\n}\n"),
    (on_text(rules.c_includes, "native/hixl/hixl_peer.c"), '#include "core/table.h"\n#include <netinet/tcp.h>\n'),
    (lambda text: rules.c_names_twice({"a.c": text}), "#if X\nint a_f(void) {\n}\n#else\nint a_f(void) {\n}\n#endif\n"),
    (unnamed_errors, 'class Client:\n    async def put(self):\n        """Writes. Raises: `ClosedError`."""\n'),
    (unnamed_errors, "class Client:\n    async def _put(self): ...\n    def size(self):\n        return 1\n"),
    (lambda text: rules.missing_files("x.py", text, {"here.py"}), '"""See `x/here.py` and `A.py`."""'),
    (on_text(rules.machine_paths), "exec /usr/bin/env; frame/work/unit; ~/work"),
    (lambda path: rules.mirrored(path, {"kvxfer/wire/session.py"}, ()), "tests/wire/test_session.py"),
    (lambda path: rules.mirrored(path, set(), ("adversity/",)), "tests/adversity/test_kill.py"),
]


@pytest.mark.parametrize(("rule", "snippet"), BAD)
def test_rule_fails_on(rule: Callable[[str], list[str]], snippet: str) -> None:
    assert rule(snippet)


@pytest.mark.parametrize(("rule", "snippet"), GOOD)
def test_rule_passes_on(rule: Callable[[str], list[str]], snippet: str) -> None:
    assert rule(snippet) == []


def test_cycles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert rules.import_cycles(graph) == ["import cycle: a -> b -> c -> a"]
    assert rules.import_cycles({"a": {"b"}, "b": set()}) == []
    assert rules.import_time_imports(ast.parse("import b\ndef f():\n    import c"), "a") == {"b"}


def test_symbols_are_read() -> None:
    assert rules.global_symbols("0000 D kvx_transport_x\n0010 T helper\n\n") == {"kvx_transport_x", "helper"}


def test_preflight_is_readable_by_old_interpreters() -> None:
    """It tells someone with Python 3.6 that 3.11 is needed, so it must parse there."""
    ast.parse(text_of("tools/preflight.py"), feature_version=(3, 6))
    run = subprocess.run([sys.executable, ROOT / "tools/preflight.py"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
