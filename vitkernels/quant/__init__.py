"""Quantize linear layers and embeddings to 8 or 4 bits for inference, and train with 8-bit matrix products."""

from vitkernels.quant.inference_modules import QuantizedEmbedding, QuantizedLinear
from vitkernels.quant.schemes import Scheme
from vitkernels.quant.swap import dequantize_, quantize_, size_in_bytes, train_in_8_bits

__all__ = [
    "QuantizedEmbedding",
    "QuantizedLinear",
    "Scheme",
    "dequantize_",
    "quantize_",
    "size_in_bytes",
    "train_in_8_bits",
]
