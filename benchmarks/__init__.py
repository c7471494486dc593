"""Measurements of kvxfer beside references on the same machine: `python -m benchmarks --help`."""
