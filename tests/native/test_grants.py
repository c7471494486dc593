"""Without memory the engine may refuse what is new. What gives access back works, or bytes would move for ever."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer.errors import KvxferError
from kvxfer.native.engine import Engine, EngineConfig, Event, OpKind
from kvxfer.native.status import StatusCode
from tests.conftest import slack

pytestmark = pytest.mark.once
HERE = Path(__file__).parent
LENGTH = 1 << 20


@pytest.fixture(scope="module")
def preload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("memory") / "no_memory.so"
    source = HERE / "no_memory.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", made, source, "-ldl"], check=True)
    return made


async def put(engine: Engine, region: int, handle: int) -> Event:
    outcome = engine.submit_one(OpKind.PUT, region, handle, 0, 0, LENGTH)
    return outcome if isinstance(outcome, Event) else await outcome[1]


async def main(transport: str, place: str) -> None:
    none = ctypes.CDLL(None).no_memory
    loop = asyncio.get_running_loop()
    engines = [
        Engine(EngineConfig(engine_id=os.urandom(16), transports=(transport,), socket_dir=place)) for _ in range(2)
    ]
    for engine in engines:
        engine.attach(loop, lambda event: None)
    near, far = engines
    mine, theirs = near.alloc(LENGTH), far.alloc(LENGTH)
    index = next(info.index for info in near.transports if info.name == transport)
    peer, connected = near.connect(index, far.transports[index].endpoint)
    assert (await connected).status == 0
    imports = []
    for _ in range(8):
        grant = far.grant(theirs.id, 0, LENGTH, 3)
        handle, imported = near.import_(
            peer, grant=grant.id, generation=grant.generation, length=LENGTH, access=3, key=grant.key
        )
        assert (await imported).status == 0
        imports.append((grant.id, handle))
    assert (await put(near, mine.id, imports[0][1])).status == 0
    none(1)
    try:
        with_nothing = [far.revoke(grant) for grant, _ in imports]
    finally:
        refused = none(0)
    events = await asyncio.wait_for(asyncio.gather(*with_nothing), 20)
    assert [event.status for event in events] == [0] * len(imports)
    for _, handle in imports:
        try:
            event = await put(near, mine.id, handle)
            assert event.status in (StatusCode.REVOKED, StatusCode.UNKNOWN, StatusCode.STALE), event
        except KvxferError as error:
            assert error.status in (StatusCode.REVOKED, StatusCode.NO_IMPORT), error
    none(1)
    try:
        far.alloc(LENGTH)
        raise AssertionError("the seam refuses nothing")
    except KvxferError:
        assert none(0) > 0
    for engine in engines:
        engine.close()
    print(f"well, {refused} refused", flush=True)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_revoke_needs_no_memory(transport: str, preload: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "LD_PRELOAD": str(preload), "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, "-m", "tests.native.test_grants", transport, str(tmp_path)]
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60 * slack(), check=False, cwd=HERE.parents[1]
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.startswith("well"), ran.stdout


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
