"""Triton products for any NVIDIA GPU, with GELU and its gradient in their epilogues."""

from vitkernels.ops.linear_gelu import triton as first_layer
from vitkernels.ops.mlp.operators import backend_functions

unsupported, run = backend_functions(first_layer, "triton")
