"""The Pallas kernels for TPUs as JAX functions: `attention`, `attention_qkvpacked`, `layer_norm_residual`,
`linear_gelu`, `eight_bit_linear`, `int8_matmul`.

They are differentiable and work under jit, vmap and shard_map. On a TPU, Mosaic compiles them; elsewhere Pallas
interprets them, slowly, for tests. Importing this package imports PyTorch, because the kernels share packages with
PyTorch's operators; it does not change JAX's devices.
"""

from vitkernels.jax.devices import kept_by_jax

with kept_by_jax():
    from vitkernels.jax.attention import attention, attention_qkvpacked
    from vitkernels.jax.norms import layer_norm_residual
    from vitkernels.jax.products import eight_bit_linear, int8_matmul, linear_gelu

__all__ = [
    "attention",
    "attention_qkvpacked",
    "eight_bit_linear",
    "int8_matmul",
    "layer_norm_residual",
    "linear_gelu",
]
