"""Rotary embeddings of q and k, and the inverse for their gradients, in one pass over memory (Triton).

A pass of its own costs less than rotation in the attention kernels, which load each key once per tile of queries. On
Hopper, q and k even go from shared memory to the tensor cores without passing through registers. The pass reads any
layout of rows and writes the one that the kernels read, which saves layout copies.

Shape suffixes: B batch, N tokens, P = 1 (q or k alone), 2 (q, k) or 3 (q, k, v), H heads, D head dim.
"""

import triton
import triton.language as tl
from torch import Tensor

from vitkernels.bridge.operator import interpretable, operator, readable, row_strides
from vitkernels.bridge.triton import cdiv, next_power_of_2, triton_call

HEADS, ELEMENTS, WARPS = 4, 2048, 4  # of a program at a time; heads are neighbors in the rows of a projection


@triton.jit
def _partners(H, D: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr):
    """Return the heads and columns of a row of HEADS heads, each padded to WIDTH columns, and which of them exist."""
    i = tl.arange(0, HEADS * WIDTH)[None, :]
    return i // WIDTH, i % WIDTH, (i // WIDTH < H) & (i % WIDTH < D)


@triton.jit
def _load_partners(
    ptr, rows, stride_h, inside, H, other,
    D: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Return the columns that rotate together as two tiles: the halves of the head dim, or even and odd columns.

    rows: the offsets of the rows, as a column. inside: which of them to load; the others, and those of heads from H on,
    are filled with `other`.
    """
    if HALVES:
        head, column, exists = _partners(H, D // 2, WIDTH // 2, HEADS)
        at = ptr + rows + head * stride_h + column
        a = tl.load(at, mask=inside & exists, other=other)
        b = tl.load(at + D // 2, mask=inside & exists, other=other)
    else:
        head, column, exists = _partners(H, D, WIDTH, HEADS)
        x = tl.load(ptr + rows + head * stride_h + column, mask=inside & exists, other=other)
        a, b = tl.split(tl.reshape(x, (x.shape[0], HEADS * WIDTH // 2, 2)))
    return a, b


@triton.jit
def _store_partners(
    ptr, rows, stride_h, inside, H, a, b,
    D: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    a, b = a.to(ptr.dtype.element_ty), b.to(ptr.dtype.element_ty)
    if HALVES:
        head, column, exists = _partners(H, D // 2, WIDTH // 2, HEADS)
        at = ptr + rows + head * stride_h + column
        tl.store(at, a, mask=inside & exists)
        tl.store(at + D // 2, b, mask=inside & exists)
    else:
        head, column, exists = _partners(H, D, WIDTH, HEADS)
        x = tl.reshape(tl.join(a, b), (a.shape[0], HEADS * WIDTH))
        tl.store(ptr + rows + head * stride_h + column, x, mask=inside & exists)


@triton.jit
def _load_sines(
    ptr, rows, stride_h, inside, H, D: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, HALVES: tl.constexpr
):
    """Return the partners' sines and cosines: 0 and 1 for rows that are not rotated."""
    sin_a, sin_b = _load_partners(ptr, rows, stride_h, inside, H, 0.0, D, WIDTH, HEADS, HALVES)
    cos_a, cos_b = _load_partners(ptr + D, rows, stride_h, inside, H, 1.0, D, WIDTH, HEADS, HALVES)
    return sin_a.to(tl.float32), sin_b.to(tl.float32), cos_a.to(tl.float32), cos_b.to(tl.float32)


@triton.jit
def _turned(a, b, sines, INVERSE: tl.constexpr):
    """Rotate partners in float32; with INVERSE, multiply by the transposed matrix, as the gradient requires."""
    sin_a, sin_b, cos_a, cos_b = sines
    a, b = a.to(tl.float32), b.to(tl.float32)
    if INVERSE:
        y_a, y_b = a * cos_a + b * sin_b, b * cos_b - a * sin_a
    else:
        y_a, y_b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    return y_a, y_b


@triton.jit
def _rotation_kernel(
    x_ptr, out_ptr, rope_ptr,
    x_b, x_n, x_p, x_h, out_b, out_n, out_p, out_h, rope_b, rope_h, rope_n, N, H, skipped,
    D: tl.constexpr, WIDTH: tl.constexpr, HALVES: tl.constexpr, INVERSE: tl.constexpr, PARTS: tl.constexpr,
    SINES_PER_HEAD: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Fill TOKENS rows of all heads of out with x, of which parts 0 and 1 are rotated; out may be x.

    skipped: the number of leading tokens that are not rotated. WIDTH: the least power of two that is at least D.
    """
    tiles = tl.cdiv(N, TOKENS)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    n = (tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS))[:, None]
    x_ptr += tl.multiple_of(b * x_b, 8)  # strides are multiples of 8; the hint enables 16-byte accesses
    out_ptr += tl.multiple_of(b * out_b, 8)
    rope_ptr += b * rope_b
    x_rows, out_rows, sine_rows = n * tl.multiple_of(x_n, 8), n * tl.multiple_of(out_n, 8), (n - skipped) * rope_n
    x_h, out_h = tl.multiple_of(x_h, 8), tl.multiple_of(out_h, 8)
    is_rotated = (n >= skipped) & (n < N)
    if not SINES_PER_HEAD:
        sines = _load_sines(rope_ptr, sine_rows, 0, is_rotated, HEADS, D, WIDTH, HEADS, HALVES)
    for first in range(0, H, HEADS):
        h = tl.cast(first, tl.int64)
        if SINES_PER_HEAD:
            of_heads = rope_ptr + h * rope_h
            sines = _load_sines(of_heads, sine_rows, rope_h, is_rotated, H - first, D, WIDTH, HEADS, HALVES)
        for p in tl.static_range(PARTS):
            x_at = tl.multiple_of(tl.cast(x_p, tl.int64) * p + h * x_h, 8)
            out_at = tl.multiple_of(tl.cast(out_p, tl.int64) * p + h * out_h, 8)
            x1, x2 = _load_partners(x_ptr + x_at, x_rows, x_h, n < N, H - first, 0.0, D, WIDTH, HEADS, HALVES)
            if p < 2:
                x1, x2 = _turned(x1, x2, sines, INVERSE)
            _store_partners(out_ptr + out_at, out_rows, out_h, n < N, H - first, x1, x2, D, WIDTH, HEADS, HALVES)


def fill_rotated(x_BNPHD: Tensor, out_BNPHD: Tensor, rope: Tensor, rope_half: bool, inverse: bool = False) -> None:
    """Fill out with x: q and k rotated as `contract.rotated` does, v as it is.

    Args:
        x_BNPHD: of any layout.
        out_BNPHD: contiguous, or the first parts of a contiguous tensor; may be x itself.
        rope, rope_half: see AttentionBackend.
        inverse: apply the transposed rotation, which takes gradients of rotated q and k to those of q and k.
    """
    B, N, P, H, D = x_BNPHD.shape
    x, out, rope = readable(interpretable(x_BNPHD)), interpretable(out_BNPHD), interpretable(rope)
    rope = rope if rope.stride(-1) == 1 else rope.contiguous()
    sines_per_head = rope.ndim > 2 and rope.shape[-3] > 1
    rope = rope.expand(B, H, *rope.shape[-2:])
    width, heads = next_power_of_2(D), min(HEADS, next_power_of_2(H))
    tokens = ELEMENTS // (heads * width)
    triton_call(
        x, out, rope, *row_strides(x), *row_strides(out), *rope.stride()[:3], N, H, N - rope.shape[2],
        kernel=_rotation_kernel, grid=(B * cdiv(N, tokens),),
        D=D, WIDTH=width, HALVES=rope_half, INVERSE=inverse, PARTS=P, SINES_PER_HEAD=sines_per_head,
        TOKENS=tokens, HEADS=heads, num_warps=WARPS,
    )  # fmt: skip
    if out is not out_BNPHD:
        out_BNPHD.copy_(out)


@operator("attention_rotate(Tensor x, Tensor rope, bool rope_half, bool inverse) -> Tensor")
def rotate(x: Tensor, rope: Tensor, rope_half: bool, inverse: bool) -> Tensor:
    """Return q or k (B, H, N, D) rotated, with the memory layout (B, N, H, D). See `fill_rotated`."""
    out = _rows_like(x)
    fill_rotated(_one_part(x), _one_part(out), rope, rope_half, inverse)
    return out


@rotate.register_fake
def _(x, rope, rope_half, inverse):
    return _rows_like(x)


def _rows_like(x_BHND: Tensor) -> Tensor:
    B, H, N, D = x_BHND.shape
    return x_BHND.new_empty(B, N, H, D).transpose(1, 2)


def _one_part(x_BHND: Tensor) -> Tensor:
    return x_BHND.transpose(1, 2).unsqueeze(2)


def _save(ctx, inputs, output):
    _, rope, ctx.rope_half, ctx.inverse = inputs
    ctx.save_for_backward(rope)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, do):
    if do is None:
        return (None,) * 4
    return rotate(do, *ctx.saved_tensors, ctx.rope_half, not ctx.inverse), None, None, None


rotate.register_autograd(_differentiate, setup_context=_save)
