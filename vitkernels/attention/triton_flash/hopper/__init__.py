"""Kernels of `triton_flash` for long sequences on Hopper, in Gluon, Triton's language for explicit layouts."""
