"""Progress: a bar on a terminal, few plain lines elsewhere."""

from __future__ import annotations

import io

from kvxfer.bench.progress import Progress, bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_redrawn_and_taken_away() -> None:
    screen = Terminal()
    progress = Progress(4, screen)
    for what in ("a long description", "short", "x", "y", "one more than planned"):
        progress.step(what)
    progress.close()
    text = screen.getvalue()
    assert "\n" not in text
    assert text.endswith(" \r")
    assert bar(4, 4) in text


def test_plain_lines_are_few() -> None:
    stream = io.StringIO()
    progress = Progress(100, stream)
    for number in range(100):
        progress.step(f"step {number}")
    progress.close()
    assert stream.getvalue().splitlines() == [stream.getvalue().rstrip("\n")]
    assert "step 0" in stream.getvalue()


def test_bars_are_as_long_as_each_other() -> None:
    assert {len(bar(done, 7)) for done in range(8)} == {26}
