"""Pass PyTorch tensors to the Pallas TPU kernels of ops/tpu_rows.py, and multiply matrices between them.

Kernels take activations as (B, N, C), so that torch_xla's SPMD can give each device its shard of the images
(bridge/pallas_spmd.py), and shared parameters with a leading 1, which is never mistaken for the images.

Shape suffixes: B images, N tokens, C channels, K input features, F output features.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import torch
from jax import lax
from torch import Tensor

from vitkernels.bridge import pallas_op
from vitkernels.ops.eight_bit_linear.pallas_tpu_kernel import round_weight
from vitkernels.ops.eight_bit_linear.pallas_tpu_kernel import weight_gradient as eight_bit_gradient
from vitkernels.ops.layer_norm_residual.pallas_tpu_kernel import norm_forward
from vitkernels.ops.linear.pallas_tpu_kernel import rows_product
from vitkernels.ops.refusals import unless_dtypes, unless_tpu_device

DTYPES = (torch.float32, torch.bfloat16)
_LARGEST_WEIGHT = 24 * 2**20  # bytes: kernels keep a weight in VMEM


def unsupported(
    name: str,
    x: Tensor,
    dtypes,
    *weights: Tensor,
    dtype: torch.dtype | None = None,
    eight_bit: torch.dtype | None = None,
) -> str | None:
    """Return why the kernels cannot take these tensors: the device of x, dtypes, or weights too large in `dtype`."""
    reason = unless_tpu_device(name, x) or unless_dtypes(dtypes, DTYPES)
    if reason is not None:
        return reason
    if eight_bit not in (None, torch.int8):
        return f"its 8-bit products are in int8, not {eight_bit}. Use backend='reference'"
    for weight in weights:
        size = weight.numel() * (dtype or x.dtype).itemsize
        if size > _LARGEST_WEIGHT:
            return (
                f"weights of at most {_LARGEST_WEIGHT >> 20} MiB stay in VMEM; {tuple(weight.shape)} takes "
                f"{size / 2**20:.0f} MiB. Use backend='reference'"
            )
    return None


def tokens(x: Tensor) -> Tensor:
    """Return (B, ..., C) as (B, N, C)."""
    return x.reshape(x.shape[0], -1, x.shape[-1]).contiguous() if x.ndim != 3 else x.contiguous()


def shared(x: Tensor | None) -> Tensor | None:
    """Return a vector (C) as (1, 1, C), a matrix (F, K) as (1, F, K)."""
    return None if x is None else x.detach().contiguous().view((1,) * (3 - x.ndim) + x.shape)


def run(op, arrays: Mapping[str, Tensor | None], **static) -> tuple[Tensor, ...]:
    """Call a kernel with the arrays that are not None and their names."""
    given = {name: x for name, x in arrays.items() if x is not None}
    found = op(*given.values(), given=tuple(given), **static)
    return found if isinstance(found, tuple) else (found,)


def unrounded(weight_FK: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight for products with x (B, ..., K) in `dtype`: as it is, if the kernels can round it in VMEM.

    A rounded copy would take memory from the forward to the backward pass. It is made if XLA computes some of the
    products and would make it anyway, if the weight itself exceeds VMEM, and under SPMD, which gathers rounded shards.
    """
    weight_FK = weight_FK.detach()
    in_kernels = _needs_kernel(x.shape[1:-1].numel()) and weight_FK.nbytes <= _LARGEST_WEIGHT
    return weight_FK if in_kernels and not _is_sharded(x) else weight_FK.to(dtype)


def _needs_kernel(tokens: int) -> bool:
    """Return whether XLA's product would be followed by a copy."""
    return tokens % 8 != 0 and tokens > 8


def _is_sharded(x: Tensor) -> bool:
    if x.device.type != "xla":
        return False
    from torch_xla import runtime

    return runtime.is_spmd()


class Factor(NamedTuple):
    """A linear layer's weight (F, K) as the kernels multiply by it, which round it to the product's dtype, or int8.

    forward, backward: the kernels' arrays "weight" and, in 8 bits, "weight_scale", for the layer and for the gradient
        of its input. In 8 bits these differ in the axis of the scales; one of them can be empty.
    """

    forward: dict[str, Tensor]
    backward: dict[str, Tensor]

    @classmethod
    def of(cls, weight_FK: Tensor, x: Tensor, dtype: torch.dtype, eight_bit: bool) -> "Factor":
        """Return the factor of products with x (B, ..., K) in `dtype`."""
        if not eight_bit:
            arrays = {"weight": unrounded(weight_FK, x, dtype).contiguous()[None]}
            return cls(arrays, arrays)
        names = "weight", "weight_scale"
        found = [_round_weight_op(weight_FK.detach().contiguous(), transposed=t) for t in (True, False)]
        return cls(*[dict(zip(names, arrays, strict=True)) for arrays in found])

    @classmethod
    def from_kept(cls, kept: Sequence[Tensor | None]) -> "Factor":
        """Return the factor for the backward pass of what `kept` returned."""
        names = "weight", "weight_scale"
        return cls({}, {name: x for name, x in zip(names, kept, strict=True) if x is not None})

    def kept(self) -> tuple[Tensor, Tensor | None]:
        """Return the tensors to save for the backward pass."""
        return self.backward["weight"], self.backward.get("weight_scale")

    def multiply(self, x_BNK: Tensor, bias_F: Tensor | None = None) -> Tensor:
        """Return x weightᵀ + bias in x's dtype, (B, N, F)."""
        if "weight_scale" in self.forward:
            return _eight_bit_product(x_BNK, {**self.forward, "bias": shared(bias_F)})
        return linear(x_BNK, self.forward["weight"][0], bias_F)

    def multiply_gradient(self, dy_BNF: Tensor) -> Tensor:
        """Return dy weight in dy's dtype, (B, N, K)."""
        if "weight_scale" in self.backward:
            return _eight_bit_product(dy_BNF, self.backward)
        return input_gradient(dy_BNF, self.backward["weight"][0])


# --- products: without reshapes, which would copy arrays whose N is not a multiple of 8 -------------------------------


def _precision(x):
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # else the MXU rounds float32 to bfloat16


def _product(x_BNK, weight, *, axis: int):
    """Contract K with axis `axis` of a matrix, rounded to x's dtype; sum in float32, round to x's dtype."""
    dims, weight = (((2,), (axis,)), ((), ())), weight.astype(x_BNK.dtype)
    y = lax.dot_general(x_BNK, weight, dims, precision=_precision(x_BNK), preferred_element_type=jnp.float32)
    return y.astype(x_BNK.dtype)


def _weight_gradient(dy_BNF, x_BNK, *, dtype: str):
    dims = (((0, 1), (0, 1)), ((), ()))
    gradient = lax.dot_general(dy_BNF, x_BNK, dims, precision=_precision(x_BNK), preferred_element_type=jnp.float32)
    return gradient.astype(dtype)


def _column_sums(x_BNF):
    return x_BNF.astype(jnp.float32).sum((0, 1))


_product_op = pallas_op(_product, name="tpu_product")
_rows_product_op = pallas_op(rows_product, name="rows_product_tpu", shard_batch=True)
_weight_gradient_op = pallas_op(_weight_gradient, name="tpu_weight_gradient")
_eight_bit_product_op = pallas_op(norm_forward, name="eight_bit_product_tpu", shard_batch=True)
_eight_bit_gradient_op = pallas_op(eight_bit_gradient, name="eight_bit_weight_gradient_tpu", shard_sums=True)
_round_weight_op = pallas_op(round_weight, name="round_weight_tpu")
_column_sums_op = pallas_op(_column_sums, name="tpu_column_sums")


def linear(x_BNK: Tensor, weight_FK: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """Return x weightᵀ + bias in x's dtype, (B, N, F)."""
    y = _multiply(x_BNK, weight_FK, 1)
    return y if bias_F is None else y + bias_F.to(y.dtype)


def input_gradient(dy_BNF: Tensor, weight_FK: Tensor) -> Tensor:
    """Return dy weight in dy's dtype, (B, N, K)."""
    return _multiply(dy_BNF, weight_FK, 0)


def _multiply(x_BNK: Tensor, weight: Tensor, axis: int) -> Tensor:
    """Multiply by the weight, rounded to x's dtype: in the kernel where XLA's product would be followed by a copy."""
    if _needs_kernel(x_BNK.shape[1]) and weight.nbytes <= _LARGEST_WEIGHT:
        return _rows_product_op(x_BNK.contiguous(), shared(weight), axis=axis)
    return _product_op(x_BNK.contiguous(), weight.contiguous(), axis=axis)


def _eight_bit_product(x_BNK: Tensor, arrays: Mapping[str, Tensor | None]) -> Tensor:
    return run(_eight_bit_product_op, {"x": x_BNK.contiguous(), **arrays}, eps=0.0, out=dtype_name(x_BNK.dtype))[0]


def weight_gradient(dy_BNF: Tensor, x_BNK: Tensor, dtype: torch.dtype, eight_bit: bool = False) -> Tensor:
    """Return dyᵀ x in `dtype`, (F, K), summed over all tokens in float32 and rounded once.

    eight_bit: round both operands to int8, with a scale per column of 1024 rows.
    """
    if eight_bit:
        return _eight_bit_gradient_op(dy_BNF.contiguous(), x_BNK.contiguous()).sum(0).to(dtype)
    return _weight_gradient_op(dy_BNF.contiguous(), x_BNK.contiguous(), dtype=dtype_name(dtype))


def column_sums(x_BNF: Tensor) -> Tensor:
    """Return float32 sums over all tokens, (F)."""
    return _column_sums_op(x_BNF.contiguous())


def dtype_name(dtype: torch.dtype) -> str:
    """Return JAX's name of a dtype."""
    return str(dtype).removeprefix("torch.")
