"""Flags come from the table of options, all of them and nothing else."""

from __future__ import annotations

import argparse

import pytest

from kvxfer.cli.options import METAVARS, add_config_flags, describe, load_from
from kvxfer.config import CONFIG_OPTIONS
from kvxfer.errors import ConfigError


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_config_flags(made)
    return made


def test_every_option_that_is_no_secret_has_a_flag_with_its_documentation() -> None:
    shown = " ".join(parser().format_help().split())
    for option in CONFIG_OPTIONS:
        if option.secret:
            assert f"--{option.name} " not in shown
        else:
            assert f"{option.flag} {METAVARS[option.kind]}" in shown
            assert option.doc.split()[0] in shown
            assert option.accepted in describe(option)


def test_flags_become_configuration() -> None:
    args = parser().parse_args(["--lease-s", "3", "--transports", "tcp,shm", "--landing-bytes-max", "1GiB"])
    config = load_from(args).config
    assert (config.lease_s, config.transports, config.landing_bytes_max) == (3.0, ("tcp", "shm"), 1 << 30)


def test_wrong_flag_names_itself() -> None:
    with pytest.raises(ConfigError) as caught:
        load_from(parser().parse_args(["--links-max", "0"]))
    assert caught.value.fields["key"] == "links_max"
    assert caught.value.fields["source"] == "flag --links-max"
