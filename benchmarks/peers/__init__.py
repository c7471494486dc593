"""Programs that put other data movers on the workloads of `kvxfer bench`; `docs/benchmarks.md` explains them."""
