"""Rotary position embeddings of timm's EVA, DINOv3, Perception Encoder and RoPE ViTs.

`rotate` is the one place that rotates q and k.

Shape suffixes: B batch, N tokens, C channels, H heads, D head dim.
"""

import torch
from timm.layers import apply_rot_embed_cat
from torch import Tensor


def rotate(x_BHND: Tensor, rope: Tensor, prefix: int, half: bool) -> Tensor:
    """Return q or k with the tokens after the first `prefix` rotated.

    Args:
        rope: sines, then cosines, (tokens, 2 * D) or with leading axes that broadcast to (B, H).
        prefix: class and register tokens, which have no position.
        half: rotate channel i together with i + D / 2, instead of neighbours.
    """
    rotated = apply_rot_embed_cat(x_BHND[:, :, prefix:], rope, half=half)
    return rotated if prefix == 0 else torch.cat((x_BHND[:, :, :prefix].to(rotated.dtype), rotated), dim=2)
