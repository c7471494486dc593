"""Judgements about a copy of kvxfer and its transports, with made-up facts."""

from __future__ import annotations

from kvxfer.doctor.facts import Finding, FindingState, Program, Transport
from kvxfer.doctor.program import judge_program, judge_transports


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def test_a_whole_copy() -> None:
    findings = by_check(list(judge_program(Program(packages={"numpy": "2.0", "cffi": "2.0"}))))
    assert {finding.state for finding in findings.values()} == {FindingState.OK}
    assert set(findings) == {"python", "native engine", "packages", "tcp_encryption"}


def test_what_may_be_broken() -> None:
    broken = Program(python=(3, 10, 9), native_error="ImportError: no GLIBC_2.99", packages={"numpy": "", "cffi": "2"})
    findings = by_check(list(judge_program(broken)))
    assert {finding.state for finding in findings.values()} == {FindingState.PROBLEM}
    assert "GLIBC_2.99" in findings["native engine"].found
    assert "pip install numpy" in findings["packages"].advice


def test_without_libcrypto_tcp_cannot_encrypt() -> None:
    findings = by_check(list(judge_program(Program(encryption_error="libcrypto.so.3: no such file"))))
    assert findings["tcp_encryption"].state is FindingState.NOT_HERE
    assert "libcrypto.so.3" in findings["tcp_encryption"].found
    [found] = judge_transports((Transport(name="tcp", memory="dram", encrypted=True),))
    assert found.found == "available for dram, encrypted"


def test_a_transport_that_is_only_a_default_may_be_missing() -> None:
    seen = (Transport(name="hixl", error="no libraries"), Transport(name="tcp", memory="dram"))
    findings = by_check(list(judge_transports(seen)))
    assert findings["hixl"].state is FindingState.NOT_HERE
    assert (findings["tcp"].state, findings["tcp"].found) == (FindingState.OK, "available for dram")


def test_a_transport_that_was_asked_for_may_not_be_missing() -> None:
    seen = (Transport(name="hixl", error="no libraries", wanted=True), Transport(name="tcp"))
    assert by_check(list(judge_transports(seen)))["hixl"].state is FindingState.WARNING


def test_without_any_transport_nothing_works() -> None:
    seen = (Transport(name="shm", error="sealed"), Transport(name="ucx", error="not built", listed=False))
    findings = by_check(list(judge_transports(seen)))
    assert findings["shm"].state is FindingState.PROBLEM
    assert findings["ucx"].state is FindingState.NOT_HERE


def test_a_transport_that_is_not_listed_is_not_used() -> None:
    [finding] = judge_transports((Transport(name="shm", listed=False),))
    assert (finding.state, "not used" in finding.found) == (FindingState.OK, True)
