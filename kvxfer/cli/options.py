"""Flags for every configuration option, generated from the one table that declares them."""

from __future__ import annotations

import argparse

from kvxfer.config import CONFIG_OPTIONS, Loaded, load
from kvxfer.config.options import Option

METAVARS = {
    "int": "N",
    "size": "BYTES",
    "seconds": "SECONDS",
    "bool": "BOOL",
    "list": "A,B,...",
    "address": "HOST:PORT",
    "host": "HOST",
    "text": "TEXT",
}


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--config FILE` and a flag per option. Values stay text here; the loader types and checks them."""
    parser.add_argument("--config", metavar="FILE", help="TOML file to read (default: $KVXFER_CONFIG)")
    group = parser.add_argument_group("configuration", "also as TOML keys and KVXFER_* environment variables")
    for option in CONFIG_OPTIONS:
        if option.flag is not None:
            group.add_argument(
                option.flag,
                dest="option_" + option.name,
                metavar=METAVARS[option.kind],
                help=describe(option).replace("%", "%%"),
            )


def describe(option: Option) -> str:
    """One line for people: what it is, what is accepted, the default."""
    default = option.show(option.default) or "empty"
    return f"{option.doc} Accepted: {option.accepted}. Default: {default}."


def load_from(args: argparse.Namespace) -> Loaded:
    """The configuration that file, environment and these flags make together. Raises `ConfigError`."""
    prefix = "option_"
    flags = {name.removeprefix(prefix): value for name, value in vars(args).items() if name.startswith(prefix)}
    return load(args.config, flags=flags)
