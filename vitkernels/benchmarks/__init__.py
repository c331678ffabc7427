"""The harnesses behind scripts/bench_*.py: kernels, ops and bare training steps, timed beside their peers."""
