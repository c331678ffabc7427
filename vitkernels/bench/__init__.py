"""Measurement: comparison tables and plots, and the harnesses behind scripts/bench_*.py."""
