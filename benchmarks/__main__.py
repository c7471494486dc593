"""`make bench`: run the measurements and print one table each.

Every rate is shown beside a reference that does only the physical work, measured in the same run, interleaved,
medians: on a shared machine only those ratios mean anything.
"""

from __future__ import annotations

import argparse
import importlib
import sys

BENCHES = {
    "client": "4 KiB put awaited in asyncio; import time; daemon start; idle CPU",
    "shm": "256 MiB and scattered blocks through shared memory, beside plain copies",
    "tcp": "256 MiB and scattered blocks over loopback tcp, beside plain C and iperf3",
}


def main() -> int:
    """Run the chosen measurements one after the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n")[0])
    listing = ", ".join(f"{name} ({what})" for name, what in BENCHES.items())
    parser.add_argument("bench", nargs="*", help=f"which ones (default: all): {listing}")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    args = parser.parse_args()
    unknown = [name for name in args.bench if name not in BENCHES]
    if unknown or not 1 <= args.rounds <= 100:
        parser.error(f"unknown measurement: {', '.join(unknown)}" if unknown else "--rounds must be 1 to 100")
    for name in args.bench or BENCHES:
        print(f"== {name}: {BENCHES[name]}", flush=True)
        importlib.import_module(f"benchmarks.bench_{name}").run(args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
