"""Programs that put other data movers on the workloads of `kvxfer bench`; `docs/benchmark-peers.md` explains them."""
