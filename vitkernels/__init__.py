"""Vision transformers with attention kernels that can be swapped and compared.

Importing this package loads none of jax, triton and torch_xla; choosing a backend that needs one does.
"""

__version__ = "0.1.0"
