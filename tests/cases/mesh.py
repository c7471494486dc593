"""One node of the mesh (C61) as a process: says where it is, hears who the others are, reaches all of them."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import kvxfer
from kvxfer.client import Client
from kvxfer.errors import KvxferError
from tests.cases.facts import pattern
from tests.cases.scale import scaled_s
from tests.conftest import slack

SLOT = 4096


async def main(number: int, count: int) -> None:
    options = {"tcp_threads": 1, "copy_threads": 1, "tcp_streams": 1, "handshake_s": scaled_s(2.0 * slack(), 5.0)}
    async with kvxfer.local(transports=("tcp",), **options) as client:
        table, source = await client.alloc(SLOT * count), await client.alloc(SLOT)
        source.array[:] = bytearray(pattern(61, number, SLOT))
        async with await client.share(table, "table"):
            print(json.dumps(list(client.addresses)), flush=True)
            loop = asyncio.get_running_loop()
            others = json.loads(await loop.run_in_executor(None, sys.stdin.readline))
            began = time.monotonic()
            reached = await asyncio.gather(*(reach(client, number, node, source) for node in others))
            answer = {"took_s": time.monotonic() - began, "reached": reached.count(True), "times": []}
            print(json.dumps(answer), flush=True)
            await loop.run_in_executor(None, sys.stdin.readline)  # when all have written
            whole = all(
                bytes(table.array[other * SLOT : (other + 1) * SLOT]) == pattern(61, other, SLOT)
                for other in range(count)
                if other != number
            )
            print(json.dumps({"whole": whole}), flush=True)


async def reach(client: Client, number: int, node: list[str], source: kvxfer.Region) -> bool:
    try:
        await client.connect(node, timeout=15)
        descriptor = await client.lookup("table", node=node, timeout=15)
        await client.put(source, descriptor, target_offset=number * SLOT, timeout=15)
    except KvxferError as error:
        print(f"{node}: {error}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
