"""Who may connect: the lists, and what they say when they refuse."""

from __future__ import annotations

import pytest

from kvxfer.config import Config
from kvxfer.daemon.acceptor import Allowed
from kvxfer.errors import NotAllowed
from kvxfer.wire.session import Facts

A, B = "0a" * 16, "0b" * 16


def identity(node_id: str = A, namespace: str = "", role: str = "peer") -> Facts:
    return Facts(role=role, node_id=node_id, incarnation="1a" * 16, namespace=namespace)


def refused(config: Config, about: Facts, *, worker: bool = False) -> str:
    """Why, or nothing."""
    allowed = Allowed(config)
    try:
        (allowed.worker if worker else allowed.peer)(about)
    except NotAllowed as why:
        assert not why.retryable
        assert why.hint
        return why.message
    return ""


def test_by_default_all_nodes_of_the_same_namespace() -> None:
    assert not refused(Config(), identity())
    assert not refused(Config(), identity(namespace="default"))
    assert "namespace" in refused(Config(), identity(namespace="other"))
    assert "namespace" in refused(Config(namespace="other"), identity())  # who says none is in the default one


def test_listed_nodes_only() -> None:
    config = Config(allow_nodes=(A,))
    assert not refused(config, identity(A))
    assert "node" in refused(config, identity(B))
    assert "node" in refused(config, identity("", role="tool"))


def test_listed_namespaces_as_well() -> None:
    config = Config(namespace="mine", allow_namespaces=("yours", "default"))
    for namespace in ("mine", "yours", "", "default"):
        assert not refused(config, identity(namespace=namespace))
    assert "namespace" in refused(config, identity(namespace="theirs"))


def test_a_tool_that_says_no_namespace_may_look() -> None:
    assert not refused(Config(namespace="mine"), identity("", role="tool"))
    assert "namespace" in refused(Config(namespace="mine"), identity("", "yours", role="tool"))


@pytest.mark.parametrize("nodes", [(), (B,)])
def test_a_worker_belongs_to_its_daemon_unless_it_says_otherwise(nodes: tuple[str, ...]) -> None:
    config = Config(namespace="mine", allow_namespaces=("yours",), allow_nodes=nodes)
    for namespace in ("", "mine", "yours"):
        assert not refused(config, identity("", namespace, "worker"), worker=True)
    assert "namespace" in refused(config, identity("", "theirs", "worker"), worker=True)
