"""Real engines run where `make test-vllm` made them an environment; elsewhere these tests are skipped by name."""

from __future__ import annotations

import pytest

from tests.integrations.vllm.engines import harness


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == harness.HERE:
            item.add_marker(pytest.mark.timeout(400))
            if not harness.vllm_python():
                item.add_marker(pytest.mark.skip(reason="engines of vLLM run under `make test-vllm`"))
