"""Measure kernels, ops and training steps, and write their results as documentation; used by scripts/bench_*.py."""
