"""Peak matrix throughput of known chips, for model FLOP/s utilization (MFU); unlisted chips have no MFU."""

import torch

# Dense TFLOP/s (int8: TOP/s) from the vendors' pages, without sparsity, per full chip. Keys are the exact names that
# drivers report, so that a MIG slice or a variant with another clock does not match.
# NVIDIA: product datasheets for H200, H100, A100, L40S, L4, V100. Google: Cloud TPU system architecture pages.
_TFLOPS = {
    "NVIDIA H200": {torch.bfloat16: 989.5, torch.float16: 989.5, torch.int8: 1979.0, torch.float8_e4m3fn: 1979.0},
    "NVIDIA H100 NVL": {torch.bfloat16: 835.5, torch.float16: 835.5, torch.int8: 1671.0, torch.float8_e4m3fn: 1671.0},
    "NVIDIA H100 PCIe": {torch.bfloat16: 756.5, torch.float16: 756.5, torch.int8: 1513.0, torch.float8_e4m3fn: 1513.0},
    "NVIDIA H100 80GB HBM3": {
        torch.bfloat16: 989.5,
        torch.float16: 989.5,
        torch.int8: 1979.0,
        torch.float8_e4m3fn: 1979.0,
    },
    "NVIDIA A100-SXM4-40GB": {torch.bfloat16: 312.0, torch.float16: 312.0, torch.int8: 624.0},
    "NVIDIA A100-SXM4-80GB": {torch.bfloat16: 312.0, torch.float16: 312.0, torch.int8: 624.0},
    "NVIDIA A100-PCIE-40GB": {torch.bfloat16: 312.0, torch.float16: 312.0, torch.int8: 624.0},
    "NVIDIA A100 80GB PCIe": {torch.bfloat16: 312.0, torch.float16: 312.0, torch.int8: 624.0},
    "NVIDIA L40S": {torch.bfloat16: 362.0, torch.float16: 362.0},
    "NVIDIA L4": {torch.bfloat16: 121.0, torch.float16: 121.0},
    "Tesla V100-SXM2-16GB": {torch.float16: 125.0},
    "Tesla V100-SXM2-32GB": {torch.float16: 125.0},
    "TPU v4": {torch.bfloat16: 275.0},
    "TPU v5e": {torch.bfloat16: 197.0, torch.int8: 394.0},
    "TPU v5p": {torch.bfloat16: 459.0, torch.int8: 918.0},
    "TPU v6e": {torch.bfloat16: 918.0, torch.int8: 1836.0},
}


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the peak dense FLOP/s of the named device for matrix products in dtype; None if unknown."""
    tflops = _TFLOPS.get(device_name, {}).get(dtype)
    return None if tflops is None else tflops * 1e12
