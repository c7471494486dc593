"""The house rules as functions: each looks at one file and returns what is wrong with it, nothing when all is well.

They work on the syntax tree or the text, never by importing, so that a rule also holds for code that does not run yet.
`tests/test_sourcecode.py` applies them to the tree and shows for each rule a snippet on which it fails.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

PYTHON_FILE_LINES_MAX = 1000
PYTHON_FUNCTION_LINES_MAX = 60
C_FILE_LINES_MAX = 1000
C_FUNCTION_LINES_MAX = 80

BANNED_MODULES = {"pickle", "marshal", "shelve", "cPickle", "dill", "ctypes"}  # foreign functions: cffi alone
BANNED_CALLS = {"eval", "exec", "__import__"}
TRANSPORT_WORDS = {"tcp", "shm", "hixl"}
IMPURE_MODULES = {
    "asyncio", "socket", "time", "os", "random", "secrets", "cffi", "uvloop", "threading", "subprocess", "select",
    "selectors", "ssl", "signal", "tempfile", "mmap", "concurrent",
}  # fmt: skip

# Put together from halves, so that the rule does not find itself.
UNFINISHED = re.compile(
    r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b|NotImplemented" + "Error"
)
MACHINE_PATH = re.compile(r"(?<![\w.~$}-])/(?:wo" + r"rk|ro" + r"ot|ho" + r"me/\w+|Us" + r"ers/\w+|opt/py" + r"pi)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One storey of the house: its modules (``wire.*`` = a whole package) and whether they must be pure."""

    name: str
    modules: tuple[str, ...]
    pure: bool = False

    def holds(self, module: str) -> bool:
        return any(
            module == entry or (entry.endswith(".*") and module.startswith(entry[:-1])) for entry in self.modules
        )


def at(path: str, line: int, text: str) -> str:
    return f"{path}:{line}: {text}"


# -- imports ----------------------------------------------------------------------------------------------------------


def imports(tree: ast.AST, module: str, *, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Every (line, absolute dotted name) that a module imports, wherever in it. ``from a import b`` gives a and a.b."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield node.lineno, name
            for alias in node.names:
                yield node.lineno, f"{name}.{alias.name}"


def import_map(
    path: str, tree: ast.AST, module: str, modules: Iterable[str], layers: Sequence[Layer], *, is_package: bool = False
) -> list[str]:
    """Imports run one way: a module may import its own layer and those before it."""
    known = set(modules)
    ranks = {name: rank for name in known for rank, layer in enumerate(layers) if layer.holds(strip_root(name))}
    if module not in ranks:
        return [at(path, 1, f"{module} is not in the import map: say in LAYERS where it belongs")]
    rank, wrong = ranks[module], []
    for line, name in imports(tree, module, is_package=is_package):
        if name in known and name not in ranks:
            wrong.append(at(path, line, f"imports {name}, which is not in the import map"))
        elif name in known and ranks[name] > rank:
            other = layers[ranks[name]].name
            wrong.append(at(path, line, f"{module} ({layers[rank].name}) imports {name} ({other}): against the map"))
        elif layers[rank].pure and name.split(".")[0] in IMPURE_MODULES:
            wrong.append(at(path, line, f"{module} is pure and may not import {name}"))
    return wrong


def strip_root(module: str) -> str:
    return module.partition(".")[2] or "__init__"


def import_time_imports(tree: ast.Module, module: str, *, is_package: bool = False) -> set[str]:
    """What is imported when the module is: not what functions or type checkers import."""
    names: set[str] = set()
    for statement in tree.body:
        checking = isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)
        if not checking and not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.update(name for _, name in imports(statement, module, is_package=is_package))
    return names


def import_cycles(graph: Mapping[str, set[str]]) -> list[str]:
    """Rings of modules that import each other at import time."""
    found: list[str] = []
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        if module in trail:
            ring = trail[trail.index(module) :]
            if module == min(ring):
                found.append("import cycle: " + " -> ".join((*ring, module)))
            return
        if module in done:
            return
        for other in sorted(graph.get(module, ())):
            visit(other, (*trail, module))
        done.add(module)

    for module in sorted(graph, reverse=True):
        done.clear()
        visit(module, ())
    return sorted(set(found))


def shim_imports(path: str, tree: ast.AST, module: str, allowed: set[str], *, is_package: bool = False) -> list[str]:
    if module in allowed:
        return []
    return [
        at(path, line, f"only {', '.join(sorted(allowed))} import the compiled engine")
        for line, name in imports(tree, module, is_package=is_package)
        if name.endswith("._shim")
    ]


# -- calls ------------------------------------------------------------------------------------------------------------


def banned_calls(path: str, tree: ast.AST, *, task_owner: bool = False) -> list[str]:
    wrong = []
    groups = task_groups(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            wrong += [
                at(path, node.lineno, f"{name} is banned") for name in names if name.split(".")[0] in BANNED_MODULES
            ]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            last = called.rpartition(".")[2]
            if called in BANNED_CALLS:
                wrong.append(at(path, node.lineno, f"{called}() is banned"))
            elif last in ("create_task", "ensure_future") and not task_owner and called.partition(".")[0] not in groups:
                wrong.append(
                    at(path, node.lineno, f"{called}: tasks start in a TaskGroup or a TaskOwner, which end them")
                )
            elif last == "when" and not node.args:
                wrong.append(
                    at(path, node.lineno, f"{called}: a handle of uvloop has no when() once its time has come")
                )
            elif called == "time.sleep":
                wrong.append(at(path, node.lineno, "time.sleep blocks the event loop"))
            elif (
                last in ("isinstance", "issubclass")
                and "Transport" in ast.unparse(node)
                and "asyncio." in ast.unparse(node)
            ):
                wrong.append(at(path, node.lineno, "uvloop's transports do not inherit from asyncio.Transport"))
    return wrong


def task_groups(tree: ast.AST) -> set[str]:
    """Names bound by ``async with asyncio.TaskGroup() as name``."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncWith):
            for item in node.items:
                if ast.unparse(item.context_expr).endswith("TaskGroup()") and item.optional_vars is not None:
                    names.add(ast.unparse(item.optional_vars))
    return names


def swallowed_errors(path: str, tree: ast.AST) -> list[str]:
    """No bare except, no ``except Exception: pass``, nothing that catches BaseException without raising."""
    wrong = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = ast.unparse(node.type) if node.type is not None else ""
        raises = any(isinstance(inner, ast.Raise) for statement in node.body for inner in ast.walk(statement))
        if not caught:
            wrong.append(at(path, node.lineno, "bare except"))
        elif "BaseException" in caught and "BaseExceptionGroup" not in caught and not raises:
            wrong.append(at(path, node.lineno, "catches BaseException (so also CancelledError) and does not raise"))
        elif caught in ("Exception", "builtins.Exception") and all(empty(statement) for statement in node.body):
            wrong.append(at(path, node.lineno, "swallows every Exception"))
    return wrong


def empty(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Pass | ast.Continue) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def transport_conditions(path: str, tree: ast.AST) -> list[str]:
    """Decisions come from what a transport can do, not from its name."""
    wrong = []
    for node in ast.walk(tree):
        tests: list[ast.AST] = []
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            tests = [node.test]
        elif isinstance(node, ast.comprehension):
            tests = list(node.ifs)
        elif isinstance(node, ast.match_case):
            tests = [node.pattern, *([node.guard] if node.guard else [])]
        for test in tests:
            words = {word for inner in ast.walk(test) for word in words_of(inner)} & TRANSPORT_WORDS
            if words:
                line = getattr(test, "lineno", 1)
                wrong.append(
                    at(
                        path,
                        line,
                        f"a condition on the name of a transport ({', '.join(sorted(words))}): ask its capabilities",
                    )
                )
    return wrong


def words_of(node: ast.AST) -> set[str]:
    text = ""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    elif isinstance(node, ast.Name):
        text = node.id
    elif isinstance(node, ast.Attribute):
        text = node.attr
    return set(re.split(r"[^a-z]+", text.lower()))


# -- sizes and form ---------------------------------------------------------------------------------------------------


def python_sizes(path: str, text: str, tree: ast.AST) -> list[str]:
    wrong = []
    lines = text.count("\n")
    if lines > PYTHON_FILE_LINES_MAX:
        wrong.append(at(path, 1, f"{lines} lines: at most {PYTHON_FILE_LINES_MAX}"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > PYTHON_FUNCTION_LINES_MAX:
                wrong.append(
                    at(path, node.lineno, f"{node.name} has {length} lines: at most {PYTHON_FUNCTION_LINES_MAX}")
                )
    return wrong


def c_functions(text: str) -> Iterator[tuple[int, str, int]]:
    """(line, signature, lines) of each function definition, given that the file is in the project's format."""
    begin, signature = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"[A-Za-z_].*\(", line) and not line.rstrip().endswith(";"):
            begin, signature = number, line.strip()
        if line.startswith("}") and begin:
            if "=" not in signature.partition("(")[0] and not signature.startswith(("typedef", "enum", "struct {")):
                yield begin, signature, number - begin + 1
            begin = 0


def c_sizes(path: str, text: str) -> list[str]:
    wrong = []
    lines = text.count("\n")
    if lines > C_FILE_LINES_MAX:
        wrong.append(at(path, 1, f"{lines} lines: at most {C_FILE_LINES_MAX}"))
    for line, signature, length in c_functions(text):
        if length > C_FUNCTION_LINES_MAX:
            wrong.append(at(path, line, f"{signature} has {length} lines: at most {C_FUNCTION_LINES_MAX}"))
    return wrong


def c_definitions(text: str) -> Iterator[tuple[int, str, bool]]:
    """(line, name, file-local) of each function definition but methods; in C++ all is local that has no C linkage."""
    text = re.sub(
        r"/\*.*?\*/|//[^\n]*|^#.*?[^\\]$", lambda found: "\n" * found.group(0).count("\n"), text, flags=re.S | re.M
    )
    text = re.sub(r"__attribute__\(\(.*?\)\)(?=\s)", "", text)
    for found in re.finditer(
        r'^[ \t]*(\b[A-Za-z_][\w\s*<>:"]*?)\b(\w+)\([^;{}]*\)\s*(?:noexcept\s*)?\{', text, flags=re.M
    ):
        head, name = found.groups()
        local = re.search(r"\bstatic\b", head) is not None
        if local or text[found.start()] not in " \t":
            unnamed = '"C"' not in head and "\nnamespace {" in text
            yield text.count("\n", 0, found.start()) + 1, name, local or unnamed


def c_names(path: str, text: str) -> list[str]:
    """A function that other files see begins with kvx_ (and the name of its transport), a file-local one with its file.

    So a profile, a debugger and a report of a crash name one place. `transport_tcp.c` counts as "tcp".
    """
    folder, _, file = path.rpartition("/")
    stem, _, suffix = file.rpartition(".")
    layer = folder.rpartition("/")[2]
    shared = f"kvx_{layer}_" if layer in TRANSPORT_WORDS and "transport_" not in stem else "kvx_"
    own = shared if suffix == "h" else f"{stem.removeprefix('transport_')}_"
    return [
        at(path, line, f"{name} does not begin with {own if local else shared}")
        for line, name, local in c_definitions(text)
        if not name.startswith(own if local else shared) and not name.isupper()
    ]


def c_includes(path: str, text: str) -> list[str]:
    """A transport includes no header of another one: what several need is in the core."""
    layer = path.split("/")[-2]
    others = {name for name in TRANSPORT_WORDS if name != layer} if layer in TRANSPORT_WORDS else set()
    return [
        at(path, number, f"includes {found[1]}/{found[2]}")
        for number, line in enumerate(text.splitlines(), 1)
        if (found := re.match(r'#include "(\w+)/([\w.]+)"', line)) and found[1] in others
    ]


def c_names_twice(texts: Mapping[str, str]) -> list[str]:
    """Functions of one name in two files."""
    first: dict[str, str] = {}
    return [
        at(path, line, f"{name} is defined in {first[name]} too")
        for path, text in texts.items()
        for line, name, _ in c_definitions(text)
        if first.setdefault(name, path) != path
    ]


def says_what_it_is_for(path: str, text: str) -> list[str]:
    """Every file with code in it starts with what it is for."""
    if not text.strip():
        return []
    if path.endswith(".py"):
        spoken = ast.get_docstring(ast.parse(text)) is not None
    else:
        spoken = text.lstrip().startswith(("/*", "//"))
    return [] if spoken else [at(path, 1, "does not begin with what it is for")]


def class_names_twice(texts: Mapping[str, str]) -> list[str]:
    """A class name leads to one module: a search for it finds the place."""
    homes: dict[str, str] = {}
    return [
        at(path, node.lineno, f"class {node.name} is defined in {homes[node.name]} too")
        for path, text in sorted(texts.items())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and homes.setdefault(node.name, path) != path
    ]


def errors_not_named(path: str, tree: ast.AST, classes: Collection[str]) -> list[str]:
    """Public methods that can raise say so in their docstring ("Raises", "Never raises", or "See" another one)."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    calls = {id(node): called_names(node) for node in functions}
    raising = {node.name for node in functions if any(isinstance(inner, ast.Raise) for inner in ast.walk(node))}
    while more := {node.name for node in functions if calls[id(node)] & raising} - raising:
        raising |= more
    return [
        at(path, node.lineno, f"{owner.name}.{node.name} does not say what it raises")
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef) and owner.name in classes
        for node in owner.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
        if isinstance(node, ast.AsyncFunctionDef) or node.name in raising
        if not re.search(r"\braise[sd]?\b|\ASee `", ast.get_docstring(node) or "", re.IGNORECASE)
    ]


def called_names(function: ast.AST) -> set[str]:
    """What a function calls: functions by name, and methods of its own object."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name):
                found.add(called.id)
            elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "self":
                found.add(called.attr)
    return found


def missing_files(path: str, text: str, there: Collection[str]) -> list[str]:
    """A source file that prose names in backticks exists; ``there`` are the names of files, without folders."""
    return [
        at(path, number, f"{found.group(1)} is no file of the project")
        for number, line in enumerate(text.splitlines(), 1)
        for found in re.finditer(r"`(?:[\w-]+/)*([a-z_0-9]+(?:\.cdef|\.csrc)?\.(?:pyi|py|cc|c|h))`", line)
        if found.group(1) not in there
    ]


def unfinished_work(path: str, text: str) -> list[str]:
    return [
        at(path, number, f"unfinished: {found.group(0)}")
        for number, line in enumerate(text.splitlines(), 1)
        if (found := UNFINISHED.search(line))
    ]


def machine_paths(path: str, text: str) -> list[str]:
    return [
        at(path, number, f"a path of one machine: {found.group(0)}")
        for number, line in enumerate(text.splitlines(), 1)
        if (found := MACHINE_PATH.search(line))
    ]


def given_up_tests(path: str, tree: ast.AST) -> list[str]:
    """No expected failures, no unconditional skips: a test that cannot run is deleted or repaired."""
    wrong = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "xfail":
            wrong.append(at(path, node.lineno, "an expected failure"))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            marks = {ast.unparse(mark).partition("(")[0] for mark in node.decorator_list}
            if marks & {"pytest.mark.skip", "unittest.skip"}:
                wrong.append(at(path, node.lineno, f"{node.name} is skipped on every machine"))
    return wrong


def dead_links(path: str, text: str, there: Callable[[str], bool]) -> list[str]:
    """Relative links of a Markdown file that lead nowhere; ``there(relative_target) -> bool`` knows the files."""
    return [
        at(path, number, f"link to {target}, which does not exist")
        for number, line in enumerate(text.splitlines(), 1)
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", line)
        if "://" not in target and not target.startswith("mailto:") and not there(target)
    ]


def global_symbols(nm_output: str) -> set[str]:
    """Names that an object file defines for others, from ``nm --defined-only --extern-only``."""
    return {fields[2] for line in nm_output.splitlines() if len(fields := line.split()) == 3}


def mirrored(test: str, sources: set[str], exempt: Iterable[str]) -> list[str]:
    """``tests/wire/test_session.py`` stands for ``kvxfer/wire/session.py``; other roots keep their name."""
    relative = test.removeprefix("tests/")
    if any(relative == entry or (entry.endswith("/") and relative.startswith(entry)) for entry in exempt):
        return []
    stem = re.sub(r"(^|/)test_", r"\1", relative)
    if stem.startswith(("examples/", "benchmarks/", "tools/")):
        candidates = [stem]
    else:
        folder, _, name = stem.removesuffix(".py").rpartition("/")
        begin = name.partition("_")[0]  # native/test_tcp_hostile.py is about a transport that fills several files
        candidates = [f"kvxfer/{stem}", f"kvxfer/{stem[:-3]}/__init__.py"]
        candidates += [f"kvxfer/{folder}/__init__.py"] if name == "init" else []
        # test_admission_line.py is about one topic of admission.py.
        words = name.split("_")
        candidates += [
            f"kvxfer/{folder}/{'_'.join(words[:count])}.py".replace("//", "/") for count in range(1, len(words))
        ]
        # C files lie in folders of their own: native/ring.c is native/core/ring.c. A pure decision may be a header.
        files = {f"{name}.c", f"{name}.h", f"transport_{begin}.c"}
        candidates += [
            path for path in sources if path.startswith(f"kvxfer/{folder}/") and path.rpartition("/")[2] in files
        ]
    if any(name in sources for name in candidates):
        return []
    return [at(test, 1, f"mirrors no module (looked for {candidates[0]})")]
