"""`kvxfer keys`, and two nodes that use what it wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer.cli import main
from kvxfer.errors import AuthenticationError
from kvxfer.net.credentials import NodeKeys, node_named
from kvxfer.tasks import Deadline
from tests.nodes import node

ROOT, NEXT = "the root of all the keys", "the root that comes next"


def keys(directory: Path, *arguments: str, roots: tuple[str, ...] = (ROOT,)) -> int:
    root = directory / "root"
    root.touch(mode=0o600)
    root.write_text("\n".join(roots))
    return main(["keys", "--root", str(root), "--directory", str(directory / "out"), *arguments])


def test_it_writes_a_file_for_each_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys(tmp_path, "a", "b", "--others", "c") == 0
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["a.keys", "b.keys"]
    path = tmp_path / "out" / "a.keys"
    assert path.stat().st_mode & 0o777 == 0o600
    found = NodeKeys.parse(path.read_text())
    assert found.node_id == node_named("a")
    assert set(found.generations[0].peers) == {node_named("b"), node_named("c")}
    told = capsys.readouterr().out
    assert f"node {node_named('a')}" in told
    assert found.generations[0].own.hex() not in told


@pytest.mark.parametrize("wrong", [("a", "a"), ("a", "--others", "a")])
def test_a_node_is_named_once(tmp_path: Path, wrong: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert keys(tmp_path, *wrong) == 2
    assert "twice" in capsys.readouterr().err


def test_a_root_that_cannot_be_read_is_named_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "--root", str(tmp_path / "nowhere"), "--directory", str(tmp_path), "a"]) == 2
    said = capsys.readouterr().err
    assert "bad value for --root: cannot be read: No such file or directory" in said
    assert "secret_file" not in said
    (tmp_path / "root").touch(mode=0o600)
    assert main(["keys", "--root", str(tmp_path / "root"), "--directory", str(tmp_path), "a"]) == 2
    assert "bad value for --root: holds 0 bytes" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../a", "/tmp/a", "a/b"])
def test_no_file_is_written_elsewhere(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys(tmp_path, name) == 2
    assert "no / in it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_a_directory_that_cannot_be_written_to_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("a file")
    assert keys(tmp_path, "a") == 2
    assert f"{tmp_path / 'out'} cannot be written to: File exists" in capsys.readouterr().err


@pytest.mark.asyncio
async def test_nodes_meet_with_their_keys_and_nobody_passes_for_another(tmp_path: Path) -> None:
    assert keys(tmp_path, "a", "b") == 0
    assert keys(tmp_path, "late", "--others", "a", "b") == 0
    files = {name: str(tmp_path / "out" / f"{name}.keys") for name in ("a", "b", "late")}
    async with node(node_keys_file=files["a"]) as a, node(node_keys_file=files["b"]) as b:
        assert a.node_id == node_named("a")
        link = await a.pool.get(b.addresses, b.node_id, Deadline.after(10))
        assert link.peer.node_id == b.node_id
        async with node(node_keys_file=files["late"]) as late:
            link = await late.pool.get(a.addresses, "", Deadline.after(10))
            assert link.peer.node_id == a.node_id
        async with node(node_keys_file=files["late"]) as thief:
            thief.node_id = a.node_id
            with pytest.raises(AuthenticationError):
                await thief.pool.get(b.addresses, "", Deadline.after(10))
