"""Whole clusters in virtual time from one seed; see docs/simulator.md."""
