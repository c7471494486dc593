"""`python -m kvxfer.doctor.accelerator`: load the accelerator's libraries, ask each card, print one line of JSON.

Runs in a process of its own, started by `probe_ascend`, because what it loads may hang or crash.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from kvxfer.doctor.ascend import CARDS_MAX, MARK
from kvxfer.errors import KvxferError

# What older toolkits do not have; kvxfer works without.
OPTIONAL = ("async_connect", "bulk_status", "capability", "address_range", "batch_copy")


def answer() -> dict[str, Any]:
    """What `ascend.read_answer` reads."""
    from kvxfer.native import ascend

    facts = ascend.probe()
    if isinstance(facts, ascend.AscendMissing):
        return {"found": False, "why": facts.reason}
    paths = (facts.acl_path, facts.meta_path, facts.hixl_path)
    return {
        "found": True,
        "simulated": facts.simulated,
        "soc": facts.soc,
        "toolkit": facts.toolkit,
        "reported": facts.reported,
        "paths": [path for path in paths if path],
        "lacks": [name.replace("_", " ") for name in OPTIONAL if not getattr(facts, name)],
        "cards": [card(device) for device in range(min(facts.devices, CARDS_MAX))],
    }


def card(device: int) -> dict[str, Any]:
    """One card; why it could not be asked."""
    from kvxfer.native import ascend

    try:
        info = ascend.device_info(device)
    except KvxferError as failure:
        return {"device": device, "error": str(failure)}
    return {
        "device": device,
        "free": info.hbm_free_bytes,
        "total": info.hbm_total_bytes,
        "healthy": info.healthy is not False,
        "physical": info.physical,
    }


def main() -> int:
    """Print the answer on a line that the library's own output cannot be mistaken for."""
    print(f"\n{MARK}{json.dumps(answer())}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
