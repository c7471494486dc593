"""Whole clusters in virtual time from one seed; see docs/testing.md#the-simulator."""
