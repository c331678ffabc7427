"""The device code of paged attention on TPU: one entry point, `attend.attend`, and two kernels."""
