"""The tables of docs/wire-format.md, written from the declarations: `python -m tests.wire.reference` renews them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from kvxfer.wire.messages import MESSAGES
from kvxfer.wire.session import DEADLINES, MAY_SEND, TRANSITIONS, State

PAGE = Path(__file__).resolve().parents[2] / "docs" / "wire-format.md"
WIRE_NAMES = {"PostingEvent": "Event"}


def message_table() -> str:
    lines = []
    for number, message in sorted(MESSAGES.items()):
        name = message.__name__
        wire = f" (`{WIRE_NAMES[name]}`)" if name in WIRE_NAMES else ""
        since = f", since version {message.since}" if message.since > 1 else ""
        lines += [f"**{number} `{name}`**{wire}{since}. {' '.join((message.__doc__ or '').split())}", ""]
        lines += ["| field | value |", "|--|--|"]
        for field, kind in message.kinds:
            added = message.added.get(field)
            optional = f"; since version {added}, may be absent" if added else ""
            lines.append(f"| `{field}` | {kind.describe()}{optional} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def state_table() -> str:
    lines = ["| state | ends after | messages that are legal, and the state that follows |", "|--|--|--|"]
    for state in State:
        following: dict[State, list[str]] = {}
        for (before, message), after in TRANSITIONS.items():
            if before is state:
                following.setdefault(after, []).append(message.__name__)
        legal = "; ".join(f"{_all_or(names)} → `{after.name}`" for after, names in following.items())
        limit = f"`{DEADLINES[state]}`" if state in DEADLINES else "–"
        lines.append(f"| `{state.name}` ({state.value}) | {limit} | {legal or 'none'} |")
    return "\n".join(lines)


def _all_or(names: list[str]) -> str:
    return "every message of the next table" if len(names) > 10 else ", ".join(f"`{name}`" for name in names)


def sender_table() -> str:
    lines = ["| link | sender | may send |", "|--|--|--|"]
    numbers = {message: number for number, message in MESSAGES.items()}
    for (role, side), messages in MAY_SEND.items():
        names = ", ".join(f"`{message.__name__}`" for message in sorted(messages, key=numbers.__getitem__))
        lines.append(f"| {role} | {side} | {names} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {"messages": message_table, "states": state_table, "senders": sender_table}


def renewed(page: str) -> str:
    """The page with each table between its two marks written anew."""
    for name, table in TABLES.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        page, found = pattern.subn(lambda match, table=table: f"{match[1]}{table()}\n{match[2]}", page)
        assert found == 1, f"docs/wire-format.md has {found} places for the table {name}"
    return page


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
