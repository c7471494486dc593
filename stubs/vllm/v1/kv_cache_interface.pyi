from typing import Any

class KVCacheConfig:
    kv_cache_groups: list[Any]
