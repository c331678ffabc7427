"""The blocks of EVA, BEiT and Swin over fused ops; same parameters and state-dict keys.

Unlike FusedBlock they add their last branch themselves: the loops of these models pass tensors between blocks.

Shape suffixes: B images, N tokens, C channels.
"""

from typing import TYPE_CHECKING, Any

import torch
from timm.models import beit
from timm.models.eva import EvaBlock
from timm.models.swin_transformer import SwinTransformerBlock
from torch import Tensor, nn

from vitkernels.models.fused_modules import ResidualFusion, layer_scale, plain_branch
from vitkernels.module_swap import SwappedModule


class _PreNormFusion(ResidualFusion):
    """The pre-norm block that EVA and BEiT share."""

    residual_dtype: torch.dtype | None

    def run(self, x_BNC: Tensor, **attention: Any) -> Tensor:
        x_BNC = x_BNC.to(self.residual_dtype or x_BNC.dtype)
        x_BNC, normed_BNC = self._add_and_norm(x_BNC, None, self.norm1)
        attended = self.attn.attend(normed_BNC, **attention)
        branch = self._project(attended, self.attn.proj, self.attn.proj_drop, layer_scale(self, 1), self.drop_path1)
        x_BNC, normed_BNC = self._add_and_norm(x_BNC, branch, self.norm2)
        return self._mlp(normed_BNC).added_to(x_BNC).to(x_BNC.dtype)


class FusedEvaBlock(SwappedModule, EvaBlock, _PreNormFusion):
    """timm's EvaBlock (EVA, EVA-02, DINOv3, Perception Encoder, RoPE ViTs)."""

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        return self.run(x, rope=rope, attn_mask=attn_mask, is_causal=is_causal)


class FusedBeitBlock(SwappedModule, beit.Block, _PreNormFusion):
    """timm's Block of BEiT."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        return self.run(x, shared_rel_pos_bias=shared_rel_pos_bias)


class FusedSwinBlock(SwappedModule, SwinTransformerBlock, ResidualFusion):
    """timm's SwinTransformerBlock over (B, height, width, C). Its windows are cut and joined as in timm."""

    residual_dtype: torch.dtype | None
    if TYPE_CHECKING:  # not at run time: annotations are the settings
        norm1: Any
        norm2: Any

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.residual_dtype or x.dtype)
        x, normed = self._add_and_norm(x, None, self.norm1)
        branch = plain_branch(self._attn(normed), None, None, self.drop_path1)
        x, normed = self._add_and_norm(x, branch, self.norm2)
        return self._mlp(normed).added_to(x).to(x.dtype)


FUSED_FAMILIES: dict[type[nn.Module], Any] = {
    EvaBlock: FusedEvaBlock,
    beit.Block: FusedBeitBlock,
    SwinTransformerBlock: FusedSwinBlock,
}
