from typing import Any

class VllmConfig:
    def __getattr__(self, name: str) -> Any: ...
