"""The command line: one static table of commands, one file per command.

A command's module is imported only when that command runs, so `kvxfer --help` and shell completion stay quick. A module
offers ``configure(parser)``, which adds its arguments, and ``run(args) -> int``, which returns the exit status. Every
`KvxferError` becomes one clear line: status 2 when the call or the configuration was wrong, 1 for anything else.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from kvxfer.errors import KvxferError, UsageError

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("kvxfer.cli.serve", "run this node's daemon"),
    "ping": ("kvxfer.cli.ping", "measure the control and data path to a node, per transport"),
    "doctor": ("kvxfer.cli.doctor", "look at this host: what kvxfer can do here, what it cannot, and what to do"),
    "demo": ("kvxfer.cli.demo", "move a real KV cache between two nodes and compare every token"),
    "bench": ("kvxfer.cli.bench", "measure the transports on the work of a KV cache, beside plain copies and sockets"),
    "keys": ("kvxfer.cli.keys", "write each node's own keys, from one root that stays off the nodes"),
    "config": ("kvxfer.cli.config", "print the effective configuration and where each value comes from"),
}
EPILOG = """examples:
  kvxfer serve                              a daemon on loopback, no set-up needed
  kvxfer serve --listen 10.0.0.5:17800 --secret-file /etc/kvxfer/secret
  kvxfer ping 10.0.0.6:17800                is that node there, and how fast
  kvxfer doctor                             what this host can do, and why not
  kvxfer config                             every option, its value and its origin

`kvxfer COMMAND --help` explains one command. Options can also be set in a TOML file (--config) and as KVXFER_*
environment variables; a flag wins over the environment, the environment over the file.
"""
EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


class Command(Protocol):
    """What a command module offers."""

    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def load_command(name: str) -> Command:
    """Import the module of one command."""
    return cast(Command, importlib.import_module(COMMANDS[name][0]))


def build_parser(chosen: str | None) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser, Command | None]:
    """The parser of all commands, that of the ``chosen`` one, and its module, which alone is imported."""
    parser = argparse.ArgumentParser(
        prog="kvxfer",
        description="Moves KV-cache tensors between the prefill and decode sides of disaggregated LLM inference.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    command, own = None, parser
    for name, (_, summary) in COMMANDS.items():
        child = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == chosen:
            command, own = load_command(name), child
            command.configure(child)
    return parser, own, command


def unrecognized(words: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """What is said about words that nothing takes: the first wrong option's likely meaning with it."""
    from kvxfer.config.options import nearest

    wrong = next((word.partition("=")[0] for word in words if word.startswith("--")), "")
    close = nearest(wrong, re.findall(r"--[\w-]+", parser.format_usage())) if wrong else None
    return f"unrecognized arguments: {' '.join(words)}" + (f" (did you mean {close}?)" if close else "")


def version() -> str:
    """The installed version, read without importing the data plane."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("kvxfer")
    except PackageNotFoundError:
        return "0+unknown"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in words if not word.startswith("-")), None)
    parser, own, command = build_parser(chosen if chosen in COMMANDS else None)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error(unrecognized(unknown, own))
    if args.version:
        print(f"kvxfer {version()}")
        return EXIT_OK
    if command is None:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    try:
        return command.run(args)
    except KvxferError as error:
        print(f"kvxfer {args.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader went away (`| head`): nothing to say, and nothing to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
