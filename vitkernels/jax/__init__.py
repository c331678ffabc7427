"""The Pallas kernels for TPUs as JAX functions: `attention`, `attention_qkvpacked`, `linear_gelu`, `int8_matmul`.

They are differentiable and work under jit, vmap and shard_map. On a TPU, Mosaic compiles them; elsewhere Pallas
interprets them, slowly, for tests. Importing this package imports PyTorch, because the kernels are in rooms that
PyTorch's operators share, but leaves JAX its devices.
"""

from vitkernels.jax.devices import kept_by_jax

with kept_by_jax():
    from vitkernels.jax.attention import attention, attention_qkvpacked
    from vitkernels.jax.products import int8_matmul, linear_gelu

__all__ = ["attention", "attention_qkvpacked", "int8_matmul", "linear_gelu"]
