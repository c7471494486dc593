"""Names of the product that nothing but tests uses: functions, classes, methods, properties and constants.

    python -m tools.unused

Who counts as a user: the package itself, the examples, the benchmarks and the tools, and code in the documentation
(what a user is told to call is used). What is called from outside by its name is in `CALLED_FROM_OUTSIDE`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from vulture import Vulture  # type: ignore[import-untyped]

ROOT = Path(__file__).parent.parent
PRODUCT = "kvxfer"
USERS = (PRODUCT, "examples", "benchmarks", "tools")
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
KINDS = frozenset({"function", "class", "method", "property"})  # and variables in capitals

# (file or folder, name, or "" for all of it): who calls it, or why it stays.
CALLED_FROM_OUTSIDE: dict[tuple[str, str], str] = {
    ("kvxfer/integrations/vllm", ""): "vLLM calls its connector by these names",
    ("kvxfer/native/types.py", "CRITICAL"): "a number of the C interface",
    ("kvxfer/native/types.py", "BULK"): "a number of the C interface",
    ("kvxfer/native/types.py", "TRANSFER"): "a number of the C interface",
    ("kvxfer/native/types.py", "CONNECT"): "a number of the C interface",
    ("kvxfer/native/types.py", "INLINE"): "a number of the C interface",
    ("kvxfer/native/types.py", "BLOCKS"): "a number of the C interface",
    ("kvxfer/daemon/metrics.py", "collect"): "prometheus-client calls its collectors",
    ("kvxfer/bench/crowd.py", "pass_round"): "asked for by its name, from another process",
    ("kvxfer/bench/crowd.py", "grow"): "asked for by its name, from another process",
    ("kvxfer/bench/target.py", "resident"): "asked for by its name, from another process",
    ("kvxfer/dataplane/plane.py", "unexpected_notifications"): "the sum of what the metrics name by type and reason",
    ("kvxfer/dataplane/plane.py", "connections_evicted"): "whether connections were evicted is seen nowhere else",
    ("kvxfer/memory/reservations.py", "pinned_blocks"): "what is held after faults is seen nowhere else",
    ("kvxfer/memory/reservations.py", "quarantined_blocks"): "what is held after faults is seen nowhere else",
}
# asyncio calls its protocols, Python its modules
BY_PYTHON = frozenset({"connection_made", "data_received", "eof_received", "connection_lost", "__getattr__", "__dir__"})


def unused(root: Path) -> list[str]:
    """One line for each name under ``root`` that only tests use, and one for each entry that excuses nothing."""
    documented = _documented(root)
    excused: set[tuple[str, str]] = set()
    lines = []
    for path, line, kind, name in _found(root):
        if name in documented or name in BY_PYTHON:
            continue
        entries = {
            (where, what) for where, what in CALLED_FROM_OUTSIDE if path.startswith(where) and what in ("", name)
        }
        excused |= entries
        if not entries:
            lines.append(f"{path}:{line}: {kind} {name} is used by tests alone, or by nobody: remove it")
    return lines + [f"tools/unused.py: {entry} excuses nothing" for entry in _vain(root, excused)]


def _found(root: Path) -> Iterator[tuple[str, int, str, str]]:
    """(path, line, kind, name) of what no user mentions."""
    finder = Vulture()
    finder.scavenge([str(root / user) for user in USERS if (root / user).is_dir()])
    for item in finder.get_unused_code():
        path = Path(item.filename).resolve().relative_to(root.resolve()).as_posix()
        if path.startswith(PRODUCT + "/") and (item.typ in KINDS or (item.typ == "variable" and item.name.isupper())):
            yield path, item.first_lineno, item.typ, item.name


def _documented(root: Path) -> frozenset[str]:
    """Words in code of the documentation."""
    pages = [page.read_text() for page in (*sorted((root / "docs").rglob("*.md")), root / "README.md") if page.exists()]
    return frozenset(word for page in pages for code in CODE.findall(page) for word in re.findall(r"\w+", code))


def _vain(root: Path, excused: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [entry for entry in CALLED_FROM_OUTSIDE if (root / entry[0]).exists() and entry not in set(excused)]


def main() -> None:
    lines = unused(ROOT)
    print("\n".join(lines) if lines else "no name is there for tests alone")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
