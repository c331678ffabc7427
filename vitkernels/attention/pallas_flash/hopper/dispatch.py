"""Calls of `pallas_flash` on Hopper: prepare bias, mask, segments and rotation, and call the operators.

This runs outside the operators, so torch.compile traces it, with symbolic sizes too. Imported only if the kernels can
run (see operators.py).

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim, 3 = q, k, v.
"""

from torch import Tensor

from vitkernels.attention.contract import folded_scale
from vitkernels.attention.pallas_flash.hopper import operators
from vitkernels.attention.pallas_flash.hopper.bias import padded_bias
from vitkernels.attention.pallas_flash.hopper.schedule import is_short
from vitkernels.attention.pallas_flash.hopper.token_ids import token_ids
from vitkernels.attention.rotation import rotate


def attend(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, rope: Tensor | None, rope_half: bool, **keywords) -> Tensor:
    """Return attention (B, H, N, D). The keywords, without rope and rope_half, are those of AttentionBackend.run."""
    factor, keywords["scale"] = _folding(**keywords)
    q_BHND = q_BHND if factor == 1 else q_BHND * factor
    call = _call(q_BHND.shape, k_BHMD.shape[2], **keywords)
    if rope is not None:
        q_BHND, k_BHMD = rotate(q_BHND, rope, rope_half, False), rotate(k_BHMD, rope, rope_half, False)
    return operators.attend(_in_rows(q_BHND), _in_rows(k_BHMD), _in_rows(v_BHMD), *call)[0]


def attend_packed(qkv_BN3HD: Tensor, rope: Tensor | None, rope_half: bool, **keywords) -> Tensor:
    """Return attention (B, N, H * D); see `attend`."""
    if _folding(**keywords)[0] != 1:
        q, k, v = qkv_BN3HD.permute(2, 0, 3, 1, 4).unbind(0)
        return attend(q, k, v, rope, rope_half, **keywords).transpose(1, 2).flatten(2)
    B, N, _, H, D = qkv_BN3HD.shape
    call = _call((B, H, N, D), N, **keywords)
    if rope is None:
        return operators.attend_packed(qkv_BN3HD, *call)[0]
    return operators.attend_rotary(qkv_BN3HD, rope, rope_half, *call)[0]


def _call(q_shape, keys: int, *, bias, mask, segment_ids, is_causal, scale, dropout_p) -> tuple:
    """Return the arguments that describe a call to the operators."""
    of_keys = _is_of_keys(mask)
    hides_keys = is_causal or segment_ids is not None or of_keys
    prepared = padded_bias(bias, None if of_keys else mask, q_shape[2], keys, scale, hides_keys)
    # The kernels for short sequences compare ids instead.
    moves_chunks = prepared is None and not is_causal and not is_short(q_shape[2], keys, q_shape[3], False)
    ids = token_ids(q_shape, keys, mask if of_keys else None, segment_ids, moves_chunks=moves_chunks)
    return prepared, *ids, is_causal, scale


def _is_of_keys(mask: Tensor | None) -> bool:
    """Return whether a mask is the same for all queries and heads of an image.

    It then becomes ids, and the kernels skip masked tiles; other masks become a bias.
    """
    return mask is not None and all(size == 1 for size in mask.shape[-3:-1])


def _folding(scale, *, bias=None, mask=None, **_) -> tuple[float, float]:
    """Return (factor, scale): what q is multiplied by, because the kernels divide a bias by the scale, and the rest."""
    has_bias = bias is not None or (mask is not None and not _is_of_keys(mask))
    return folded_scale(scale) if has_bias else (1.0, scale)


def _in_rows(x_BHND: Tensor) -> Tensor:
    """Return x with the memory layout (B, N, H, D) of the Hopper kernels.

    Otherwise the operator would copy x in both passes, because it saves its arguments and not their copies. A compiler
    fuses this copy with the operation before it.
    """
    rows_BNHD = x_BHND.transpose(1, 2)
    return x_BHND if rows_BNHD.is_contiguous() else rows_BNHD.contiguous().transpose(1, 2)
