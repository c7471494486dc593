"""Helpers for tests of kvxfer and of its users: real daemons and workers as processes, a proxy, a simulator, a soak."""
