"""Endurance: real daemons and workers under mixed traffic and faults, and a judge who looks for what grows."""
