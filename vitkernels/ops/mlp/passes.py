"""The library's products; GELU, its gradient and the bias sums in elementwise passes of Triton kernels."""

from vitkernels.ops.linear_gelu import passes as first_layer
from vitkernels.ops.mlp.operators import backend_functions

unsupported, run = backend_functions(first_layer, "passes")
