"""Transfers over one engine, in a worker or in the daemon: which transport, who may go now, one outcome for each.

Bytes move in `kvxfer.native`; what is moved, and why, is decided by the callers: `kvxfer.flows`, a node's landings.
"""
