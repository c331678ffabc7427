"""quantized_matmul: activations times weights of 8 or 4 bits, in torch_xla's layouts, per channel or blockwise.

Shape suffixes: K in features, N out features, S = K / block_size blocks, B = block_size; "..." tokens.
"""

import torch
from torch import Tensor

from vitkernels.errors import UsageError
from vitkernels.ops.checks import check_floating, check_same_device
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
    """Return x Wᵀ + bias, where W = w · scale − zero_point is stored in 8 or 4 bits.

    Layouts and the meaning of zero_point are those of torch_xla's `torch.ops.xla.quantized_matmul`, so the same weights
    load into both.

    Args:
        x: (..., K), floating point.
        w: one of
            int8 (N, K), with one scale per out feature (block_size −1);
            int8 (S, B, N), with one scale per block of B in features;
            with weight_bits=4, one of these holding −8 … 7 (torch_xla's format), or uint8 from `pack_int4` with two
            weights per byte: (N, ⌈K/2⌉) or (S, ⌈B/2⌉, N);
            fp8 (e4m3) (N, K), with activation_bits=8, which then rounds tokens to fp8, and without a zero point.
        scale: (N,) or (S, N), floating point.
        zero_point: same shape as scale, or None for symmetric weights. In the units of W: scale times the integer
            zero point; integers are therefore refused.
        bias: (N,) or None.
        activation_bits: 8 rounds each token to int8, symmetric, its largest magnitude at 127, and sums in int32 (for
            fp8 weights to fp8, its largest magnitude at 448). 16 keeps x in its own dtype.
        backend: "auto" or a name from BACKENDS.names(). For many tokens "triton" uses the kernels that measured faster:
            cuBLAS for fp8, and Pallas for int8 on Hopper if jax is installed.

    Returns:
        (..., N) in x's dtype. Sums and scales are float32 or wider.

    Raises:
        UsageError (a ValueError): invalid shapes, dtypes, devices or bits, tensors that require a gradient (except
            under torch.no_grad()), or a named backend that cannot take the call.
    """
    _check_precision(x, w, zero_point, block_size, weight_bits, activation_bits)
    _check_shapes(x, w, scale, zero_point, bias, block_size)
    check_same_device("quantized_matmul", "x", x, w=w, scale=scale, zero_point=zero_point, bias=bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, scale, zero_point, bias)):
        raise UsageError(
            "quantized_matmul is for inference and has no gradient; call it under torch.no_grad(), or train with "
            "vitkernels.quant.train_in_8_bits",
            code="ops.quantized_matmul.gradient",
        )
    x_MK = x.reshape(-1, x.shape[-1])
    args = x_MK, w, scale, zero_point, bias, block_size, activation_bits
    return BACKENDS.pick(backend, x.device, *args).run(*args).reshape(*x.shape[:-1], scale.shape[-1])


def _check_precision(x, w, zero_point, block_size, weight_bits, activation_bits) -> None:
    for name, value, choices in (("weight_bits", weight_bits, (8, 4)), ("activation_bits", activation_bits, (16, 8))):
        if value not in choices:
            raise UsageError(
                f"{name} must be {choices[0]} or {choices[1]}, got {value!r}",
                code=f"ops.quantized_matmul.{name}", value=value,
            )  # fmt: skip
    check_floating("quantized_matmul", "x", x)
    if x.dtype.itemsize < 2:
        raise UsageError(
            f"x must have 16 bits or more, got {x.dtype}; use activation_bits=8 to round tokens",
            code="ops.quantized_matmul.dtype", argument="x", dtype=x.dtype,
        )  # fmt: skip
    is_fp8 = w.dtype == torch.float8_e4m3fn
    if not (is_fp8 or w.dtype == torch.int8 or (w.dtype == torch.uint8 and weight_bits == 4)):
        raise UsageError(
            "w must be int8, float8_e4m3fn, or with weight_bits=4 uint8 from pack_int4; "
            f"got {w.dtype} with weight_bits={weight_bits}",
            code="ops.quantized_matmul.dtype", argument="w", dtype=w.dtype,
        )  # fmt: skip
    if is_fp8 and ((weight_bits, activation_bits, block_size) != (8, 8, -1) or zero_point is not None):
        raise UsageError(
            "fp8 weights require weight_bits=8, activation_bits=8, block_size=-1 and no zero point; got "
            f"{weight_bits}, {activation_bits}, {block_size} and {'none' if zero_point is None else 'a zero point'}",
            code="ops.quantized_matmul.fp8",
        )


def _check_shapes(x, w, scale, zero_point, bias, block_size) -> None:
    if x.ndim < 1 or not x.shape[-1]:
        raise UsageError(
            f"x must have shape (..., in features) with at least one in feature, got {tuple(x.shape)}",
            code="ops.quantized_matmul.shape", argument="x", shape=tuple(x.shape),
        )  # fmt: skip
    K = x.shape[-1]
    if block_size != -1 and (block_size < 1 or K % block_size):
        raise UsageError(
            f"block_size must be -1 or divide the {K} in features of x; got {block_size}",
            code="ops.quantized_matmul.block_size", block_size=block_size, in_features=K,
        )  # fmt: skip
    if block_size == -1:
        ndim, layout, shape, scale_shape = 2, "(out, in)", (*w.shape[:1], K), tuple(w.shape[:1])
    else:
        S = K // block_size
        ndim, layout = 3, "(in / block_size, block_size, out)"
        shape, scale_shape = (S, block_size, *w.shape[2:]), (S, *w.shape[2:])
    packed = w.dtype == torch.uint8
    stored = (shape[0], -(-shape[1] // 2), *shape[2:]) if packed else shape
    if w.ndim != ndim or tuple(w.shape) != stored:
        raise UsageError(
            f"w must have shape {layout}{' with two in features per byte' if packed else ''} for {K} in features and "
            f"block_size={block_size}; got {tuple(w.shape)}",
            code="ops.quantized_matmul.shape", argument="w", shape=tuple(w.shape),
        )  # fmt: skip
    if zero_point is not None and not zero_point.dtype.is_floating_point:
        raise UsageError(
            f"zero_point must be floating point, in the units of W, got {zero_point.dtype}; multiply an integer zero "
            "point by scale",
            code="ops.quantized_matmul.dtype", argument="zero_point", dtype=zero_point.dtype,
        )  # fmt: skip
    check_floating("quantized_matmul", "scale", scale, scale_shape)
    if zero_point is not None:
        check_floating("quantized_matmul", "zero_point", zero_point, scale_shape)
    if bias is not None:
        check_floating("quantized_matmul", "bias", bias, scale_shape[-1:])
