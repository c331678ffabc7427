"""quantized_matmul: activations times weights of 8 or 4 bits, in torch_xla's layouts, per channel or blockwise.

Shape suffixes: K in features, N out features, S = K / block_size blocks, B = block_size; "..." tokens.
"""

import torch
from torch import Tensor

from vitkernels.errors import UsageError
from vitkernels.ops.quantized_matmul.packing import pack_int4, unpack_int4
from vitkernels.registry.op import Op

__all__ = ["BACKENDS", "pack_int4", "quantized_matmul", "unpack_int4"]

BACKENDS = Op.in_folder(
    __name__,
    ("reference", "triton", "pallas_tpu", "xla"),
    auto={"cuda": ("triton",), "tpu": ("pallas_tpu", "xla"), "xla": ("xla",)},
)


def quantized_matmul(
    x: Tensor,
    w: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    block_size: int = -1,
    weight_bits: int = 8,
    activation_bits: int = 16,
    backend: str = "auto",
) -> Tensor:
    """x Wᵀ + bias, where W = w · scale − zero_point is stored in 8 or 4 bits.

    Args:
        x: (..., K), floating.
        w: int8 (N, K) with one scale per out feature (block_size −1), or int8 (S, B, N) with one per block of B in
            features. With weight_bits=4 either int8 that holds −8 … 7, as torch_xla has it, or uint8 with two weights
            to a byte from `pack_int4`: (N, ⌈K/2⌉) or (S, ⌈B/2⌉, N). Or fp8 (e4m3) (N, K) with activation_bits=8, which
            then rounds tokens to fp8, and no zero point.
        scale: (N,) or (S, N), floating.
        zero_point: as scale, or None for symmetric weights. In the units of W: scale times the integer zero point, so
            integers are refused.
        bias: (N,) or None.
        activation_bits: 8 rounds each token to int8 first, symmetric, its largest magnitude at 127, and sums in int32
            (to fp8, its largest magnitude at 448, where the weights are fp8); 16 leaves x in its own dtype.
        backend: "auto" (the fastest that takes the call here) or one of BACKENDS.names(). "triton" leaves products of
            many tokens to kernels that measured faster: cuBLAS in fp8, and Pallas in int8 on Hopper where jax is.

    Returns: (..., N) in x's dtype. Sums and scales are float32 or wider.

    Raises: UsageError (a ValueError) for shapes, dtypes and bits that do not fit, tensors that require a gradient (but
        for torch.no_grad()), or a named backend that cannot run.

    Layouts and the meaning of zero_point are those of torch_xla's `torch.ops.xla.quantized_matmul`, so weights made
    for one load into the other.
    """
    _check(x, w, scale, zero_point, bias, block_size, weight_bits, activation_bits)
    x_MK = x.reshape(-1, x.shape[-1])
    args = x_MK, w, scale, zero_point, bias, block_size, activation_bits
    return BACKENDS.pick(backend, x.device, *args).run(*args).reshape(*x.shape[:-1], scale.shape[-1])


def _check(x, w, scale, zero_point, bias, block_size, weight_bits, activation_bits) -> None:
    for name, value, choices in (("weight_bits", weight_bits, (8, 4)), ("activation_bits", activation_bits, (16, 8))):
        if value not in choices:
            raise UsageError(f"{name} must be {choices[0]} or {choices[1]}, got {value!r}")
    if x.ndim < 1 or not x.shape[-1] or not x.dtype.is_floating_point or x.dtype.itemsize < 2:
        raise UsageError(
            f"x must be (..., in features), one at least, floating, of 16 bits or more; got {x.dtype} {tuple(x.shape)}"
        )
    is_fp8 = w.dtype == torch.float8_e4m3fn
    if not (is_fp8 or w.dtype == torch.int8 or (w.dtype == torch.uint8 and weight_bits == 4)):
        raise UsageError(
            "w must be int8, or with weight_bits=4 uint8 from pack_int4, or float8_e4m3fn; "
            f"got {w.dtype} with weight_bits={weight_bits}"
        )
    if is_fp8 and ((weight_bits, activation_bits, block_size) != (8, 8, -1) or zero_point is not None):
        raise UsageError(
            "fp8 weights go with weight_bits=8, activation_bits=8, block_size=-1 and no zero point; got "
            f"{weight_bits}, {activation_bits}, {block_size} and {'one' if zero_point is not None else 'none'}"
        )
    K, packed = x.shape[-1], w.dtype == torch.uint8
    if block_size == -1:
        shape, layout, scale_shape = (*w.shape[:1], K), "(out, in)", tuple(w.shape[:1])
    elif block_size < 1 or K % block_size:
        raise UsageError(f"block_size must be -1 or divide the {K} in features of x; got {block_size}")
    else:
        shape = (K // block_size, block_size, *w.shape[2:])
        layout, scale_shape = "(in / block_size, block_size, out)", (K // block_size, *w.shape[2:])
    stored = (shape[0], -(-shape[1] // 2), *shape[2:]) if packed else shape
    if w.ndim != len(layout.split(",")) or tuple(w.shape) != stored:
        how = " with two in features to a byte" if packed else ""
        raise UsageError(
            f"w must be {layout}{how} for {K} in features and block_size={block_size}; got {tuple(w.shape)}"
        )
    given = {"scale": (scale, scale_shape), "zero_point": (zero_point, scale_shape), "bias": (bias, scale_shape[-1:])}
    for name, (tensor, shape) in given.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape or not tensor.dtype.is_floating_point:
            units = ". It is in W's units: an integer zero point times scale" if name == "zero_point" else ""
            raise UsageError(
                f"{name} must be floating, of shape {shape} beside w {tuple(w.shape)}; "
                f"got {tensor.dtype} {tuple(tensor.shape)}{units}"
            )
        if tensor.device != x.device:
            raise UsageError(f"{name} is on {tensor.device}, x on {x.device}; move them to one device")
    if w.device != x.device:
        raise UsageError(f"w is on {w.device}, x on {x.device}; move them to one device")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, scale, zero_point, bias)):
        raise UsageError(
            "quantized_matmul is for inference and has no gradient; call it under torch.no_grad(), or train with "
            "vitkernels.quant.train_in_8_bits"
        )
