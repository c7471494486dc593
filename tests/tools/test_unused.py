"""What only tests use is found, and what users use is not."""

from __future__ import annotations

from pathlib import Path

from tools import unused

SOURCE = """
LIMIT = 3
FORGOTTEN = 4

class Line:
    def enter(self) -> int:
        return LIMIT

    def tested(self) -> int:
        return 0

    def told(self) -> int:
        return 0

    def data_received(self) -> None:
        pass
"""


def project(place: Path) -> Path:
    for path, text in {
        "kvxfer/line.py": SOURCE,
        "examples/use.py": "from kvxfer.line import Line\nprint(Line().enter())\n",
        "tests/test_line.py": "from kvxfer.line import Line\nprint(Line().tested())\n",
        "docs/api.md": "What one is told to call is used: `line.told()`; what is tested is not.\n",
    }.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)
    return place


def test_names_for_tests_alone_are_found(tmp_path: Path) -> None:
    found = unused.unused(project(tmp_path))
    assert [line.split(" is used by")[0] for line in found] == [
        "kvxfer/line.py:3: variable FORGOTTEN",
        "kvxfer/line.py:9: method tested",
    ]


def test_an_excuse_that_excuses_nothing_is_found(tmp_path: Path) -> None:
    place = project(tmp_path)
    (place / "kvxfer" / "daemon").mkdir()
    (place / "kvxfer" / "daemon" / "metrics.py").write_text("")
    assert "tools/unused.py: ('kvxfer/daemon/metrics.py', 'collect') excuses nothing" in unused.unused(place)
