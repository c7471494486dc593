"""One vLLM engine in this process, driven by lines of JSON on stdin; answers and events are lines of JSON on stdout.

It is stepped the way vLLM's own engine process is: whenever there is work, and also while the connector still holds
blocks of requests that are over. What vLLM prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from typing import Any

IDLE_S = 0.001


class Engine:
    def __init__(self, settings: dict[str, Any], out: Any) -> None:
        self.out = out
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = settings.pop("transfer", None)
        started = time.monotonic()
        self.llm = LLM(
            enforce_eager=True,
            distributed_executor_backend="uni",
            disable_log_stats=False,
            kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
            **settings,
        )
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free_at_start = self.pool.get_num_free_blocks()
        self.tell(what="up", seconds=round(time.monotonic() - started, 2), free=self.free_at_start)

    def tell(self, **event: Any) -> None:
        self.out.write(json.dumps(event) + "\n")
        self.out.flush()

    # -- commands, each answered by one line with its number -------------------------------------------------------

    def add(self, id: str, prompt: list[int], tokens: int, params: dict[str, Any] | None = None) -> dict[str, Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params is not None else None,
        )
        self.engine.add_request(id, {"prompt_token_ids": prompt}, sampling)
        return {}

    def add_and_abort(self, steps: int = 0, **how: Any) -> dict[str, Any]:
        """Add a request and abort it after so many steps; nobody hears of it again."""
        self.add(**how)
        for _ in range(steps):
            self.step()
        return self.abort([how["id"]])

    def abort(self, ids: list[str]) -> dict[str, Any]:
        self.engine.abort_request(ids)
        return {}

    def blocks(self) -> dict[str, Any]:
        return {"free": self.pool.get_num_free_blocks(), "start": self.free_at_start}

    def states(self) -> dict[str, Any]:
        return {"states": {name: one.status.name for name, one in self.scheduler.requests.items()}}

    def preempt(self) -> dict[str, Any]:
        """All that run are preempted, as when blocks run out."""
        return {"good": self.scheduler.reset_prefix_cache(reset_running_requests=True)}

    def policy(self, recompute: bool) -> dict[str, Any]:
        """`kv_load_failure_policy` from now on."""
        self.scheduler.recompute_kv_load_failures = recompute
        return {}

    def forget(self) -> dict[str, Any]:
        return {"good": self.scheduler.reset_prefix_cache()}

    def zero(self) -> dict[str, Any]:
        """Every byte of the cache becomes 0: what is compared elsewhere must now differ."""
        runner = self.core.model_executor.driver_worker.worker.model_runner
        for tensor in runner.kv_caches:
            for part in tensor if isinstance(tensor, tuple | list) else (tensor,):
                part.zero_()
        return {}

    def metrics(self) -> dict[str, Any]:
        """The sums of the connector's Prometheus series, as a scrape of the engine sees them."""
        from prometheus_client import REGISTRY

        found: dict[str, float] = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                if "kvxfer" in sample.name and not sample.name.endswith(("_created", "_bucket")):
                    key = sample.name
                    label = sample.labels.get("reason") or sample.labels.get("way")
                    key += f"{{{label}}}" if label else ""
                    found[key] = found.get(key, 0.0) + sample.value
        return {"metrics": found}

    def version(self) -> dict[str, Any]:
        import vllm

        return {"version": vllm.__version__}

    # -- the loop ------------------------------------------------------------------------------------------------

    def command(self, line: str) -> None:
        asked = json.loads(line)
        number, name = asked.pop("number"), asked.pop("do")
        self.tell(what="answer", number=number, **getattr(self, name)(**asked))

    def step(self) -> bool:
        """One step; whether it brought anything."""
        outputs = self.engine.step()
        for output in outputs:
            if output.finished:
                self.tell(
                    what="finished",
                    id=output.request_id,
                    tokens=list(output.outputs[0].token_ids),
                    reason=output.outputs[0].finish_reason,
                    params=output.kv_transfer_params,
                )
        return bool(outputs)

    def run(self) -> None:
        pending = b""
        while True:
            busy = self.scheduler.has_requests()
            wait = 0.0 if busy and self.step() else (IDLE_S if busy else 0.02)
            if not select.select([0], [], [], wait)[0]:
                continue
            chunk = os.read(0, 1 << 20)
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                self.command(line.decode())


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints wherever it likes
    settings = json.loads(sys.stdin.readline())
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        **settings.pop("environment", {}),
    )
    engine = Engine(settings, out)
    try:
        engine.run()
    finally:
        out.flush()
        os._exit(0)  # vLLM's threads do not end by themselves


if __name__ == "__main__":
    main()
