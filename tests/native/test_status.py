"""The C enum and the Python map agree, code by code."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from kvxfer import errors
from kvxfer.native import status as module
from kvxfer.native._shim import ffi, lib
from kvxfer.native.status import BY_STATUS, StatusCode, error_for

HEADER = Path(module.__file__).with_name("status.h").read_text()
IN_C = {
    name.removeprefix("KVX_").removeprefix("E_"): int(value)
    for name, value in re.findall(r"^\s+(KVX_\w+) = (\d+)", HEADER, flags=re.MULTILINE)
}
BASES = {0: errors.UsageError, 1: errors.TransferError, 2: errors.PeerError, 3: errors.TransportError}


def test_the_enums_agree() -> None:
    assert {status.name: status.value for status in StatusCode} == IN_C
    assert len(IN_C) > 40


def test_the_engine_knows_the_names() -> None:
    for status in StatusCode:
        name = ffi.string(lib.kvx_status_name(status)).decode()
        assert name.removeprefix("KVX_").removeprefix("E_") == status.name
    assert ffi.string(lib.kvx_status_name(9999)) == b"unknown"


def test_every_failure_has_its_error() -> None:
    assert set(BY_STATUS) == set(StatusCode) - {StatusCode.OK}


@pytest.mark.parametrize("status", [status for status in StatusCode if status != StatusCode.OK])
def test_errors_carry_what_is_known(status: StatusCode) -> None:
    vendors = error_for(status, sys_errno=503900)
    assert vendors.fields == {"vendor_status": 503900}, "no errno of the system's"
    assert "503900" in str(vendors)
    error = error_for(status, sys_errno=2, what="testing", op_id=5, peer="p", transport="t", length=9)
    assert type(error) is BY_STATUS[status][0]
    assert (error.status, error.op_id, error.peer, error.transport) == (status, 5, "p", "t")
    assert error.fields == {"length": 9, "errno": 2}
    assert "testing: " in str(error)
    assert "No such file" in str(error)


def test_who_has_no_local_port_left_is_told_what_to_do() -> None:
    error = error_for(StatusCode.UNREACHABLE, sys_errno=errno.EADDRNOTAVAIL)
    assert "ip_local_port_range" in str(error.hint)
    assert error_for(StatusCode.UNREACHABLE, sys_errno=errno.ECONNREFUSED).hint != error.hint


@pytest.mark.parametrize(("unknown", "base"), [(99, 0), (199, 1), (299, 2), (399, 3)])
def test_unknown_codes_become_the_base_of_their_range(unknown: int, base: int) -> None:
    assert type(error_for(unknown)) is BASES[base]


@pytest.mark.parametrize("unknown", [-1, 500, 10**6])
def test_codes_of_no_range_are_our_bug(unknown: int) -> None:
    assert type(error_for(unknown)) is errors.InternalError
