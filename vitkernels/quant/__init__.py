"""Linear layers and embeddings in 8 and 4 bits for inference, and training whose products run in 8 bits."""

from vitkernels.quant.modules import QuantizedEmbedding, QuantizedLinear
from vitkernels.quant.schemes import Scheme
from vitkernels.quant.swap import dequantize_, quantize_, size_in_bytes
from vitkernels.quant.training import train_in_8_bits

__all__ = [
    "QuantizedEmbedding",
    "QuantizedLinear",
    "Scheme",
    "dequantize_",
    "quantize_",
    "size_in_bytes",
    "train_in_8_bits",
]
