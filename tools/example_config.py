"""Writes deploy/kvxfer.toml: every option with its text, range and default, from the table that the loader itself uses.

python -m tools.example_config
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from kvxfer.config import CONFIG_OPTIONS
from kvxfer.config.options import Option, format_size

TARGET = Path(__file__).resolve().parent.parent / "deploy" / "kvxfer.toml"
HEAD = """\
# kvxfer.toml: every option of `kvxfer serve`, with its default. Remove the # before a line to change it.
# Flags win over KVXFER_* variables of the environment, which win over this file; `kvxfer config` shows the result.
# Written by `python -m tools.example_config`.
"""


def toml_value(option: Option, value: object) -> str:
    """The value as TOML; sizes in the unit that shows them exactly."""
    if option.kind == "size" and isinstance(value, int):
        return json.dumps(format_size(value)) if value else "0"
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def render() -> str:
    """The whole file."""
    parts = [HEAD]
    for option in CONFIG_OPTIONS:
        words = f"{option.doc} Accepted: {option.accepted}."
        parts.append(textwrap.fill(words, 118, initial_indent="# ", subsequent_indent="# "))
        parts.append(f"#{option.name} = {toml_value(option, option.default)}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
