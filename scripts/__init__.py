"""Programs of a checkout, which are not installed: `scripts/quickstart`, `scripts/test`,
`scripts/bench_*`."""
