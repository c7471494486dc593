"""Tests that need torch run in an environment of their own (`make test-torch`); elsewhere they are not collected."""

from __future__ import annotations

from importlib.util import find_spec

NEED_TORCH = ["test_torch.py", "test_real_model.py"]
collect_ignore = [] if find_spec("torch") else NEED_TORCH


def pytest_report_header() -> str:
    return f"left to make test-torch: {', '.join(collect_ignore)}" if collect_ignore else "torch: here"
