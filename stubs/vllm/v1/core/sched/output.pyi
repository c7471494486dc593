from typing import Any

class SchedulerOutput:
    num_scheduled_tokens: dict[str, int]
    preempted_req_ids: set[str] | None
    scheduled_new_reqs: list[Any]
    scheduled_cached_reqs: Any
