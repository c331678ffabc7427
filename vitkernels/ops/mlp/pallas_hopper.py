"""Mosaic-GPU Pallas products for NVIDIA Hopper, with GELU and its gradient in epilogues that overlap with them."""

from vitkernels.ops.linear_gelu import pallas_hopper as first_layer
from vitkernels.ops.mlp.operators import backend_functions

unsupported, run = backend_functions(first_layer, "pallas_hopper")
