"""Estimate TPU step and kernel times without a TPU, from the schedules that libtpu's compiler writes."""
