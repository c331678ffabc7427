"""timm's transformer blocks with fused seams: what one sublayer adds and the next one's norm are a single operation.

A sublayer's result stays apart from the residual stream until the next LayerNorm needs the sum, which may be in the
next block. Parameters and their names are timm's.

Shape suffixes: B images, N tokens, C channels.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from timm.layers import Attention, DropPath, LayerScale, Mlp
from timm.layers.activations import GELU, GELUTanh
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F

from vitkernels.models.attention_layer import BackendAttention
from vitkernels.module_swap import SwappedModule
from vitkernels.ops import layer_norm_residual, linear, mlp


class Branch(NamedTuple):
    """What a sublayer gave, with all that acts on it before it is added to the residual stream.

    A tuple, so that FSDP finds the tensors in what a block takes and returns.
    """

    value_BNC: Tensor
    bias_C: Tensor | None
    layer_scale_C: Tensor | None
    sample_scale_B: Tensor | None

    def added_to(self, x_BNC: Tensor) -> Tensor:
        value = self.value_BNC
        if self.bias_C is not None:
            value = value + self.bias_C
        if self.layer_scale_C is not None:
            value = value * self.layer_scale_C
        if self.sample_scale_B is not None:
            value = value * self.sample_scale_B[:, None, None]
        return x_BNC + value


class FusedLinear(SwappedModule, nn.Linear):
    """nn.Linear whose gradients the op `linear` calculates; the same parameters."""

    backend: str
    is_qkv: bool
    weights_in_float32 = True  # their gradients, which autocast would round

    def forward(self, x: Tensor, add_bias: bool = True) -> Tensor:
        return linear(x, self.weight, self.bias if add_bias else None, is_qkv=self.is_qkv, backend=self.backend)


class FusedBlock(SwappedModule, Block):
    """timm's Block, which can hand its last branch to the next block instead of adding it.

    ops: op name -> backend, for layer_norm_residual (needed) and mlp (absent: timm's).
    keep_activation: mlp's option.
    """

    ops: Mapping[str, str]
    keep_activation: bool

    @property
    def weights_in_float32(self) -> bool:
        """Whether weights have gradients that autocast would round: mlp's."""
        return self.ops.get("mlp", "eager") != "eager"

    def forward(
        self,
        x_BNC: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        arriving: Branch | None = None,
        hand_on: bool = False,
    ) -> Tensor | tuple[Tensor, Branch]:
        """timm's block on x + arriving; with hand_on the MLP's branch is returned beside the stream and not added."""
        x_BNC, normed_BNC = self._seam(x_BNC, arriving, self.norm1)
        attended_BNC = self.attn.attend(normed_BNC, attn_mask, is_causal)
        branch = self._branch(attended_BNC, self.attn.proj, self.attn.proj_drop, self.ls1, self.drop_path1)
        x_BNC, normed_BNC = self._seam(x_BNC, branch, self.norm2)
        branch = self._mlp(normed_BNC)
        if not hand_on:
            return branch.added_to(x_BNC)
        # FSDP frees a block's parameters when the block returns: what the next one needs of them goes as copies.
        bias_C, layer_scale_C = (None if p is None else p.clone() for p in (branch.bias_C, branch.layer_scale_C))
        return x_BNC, branch._replace(bias_C=bias_C, layer_scale_C=layer_scale_C)

    def _seam(self, x_BNC: Tensor, branch: Branch | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
        extras = {}
        if branch is not None:
            extras = {
                "branch_bias_C": branch.bias_C,
                "layer_scale_C": branch.layer_scale_C,
                "sample_scale_B": branch.sample_scale_B,
            }
        value = None if branch is None else branch.value_BNC
        backend = self.ops["layer_norm_residual"]
        return layer_norm_residual(x_BNC, value, norm.weight, norm.bias, norm.eps, **extras, backend=backend)

    def _branch(self, x_BNE: Tensor, last: nn.Linear, drop: nn.Dropout, scale, drop_path) -> Branch:
        """The sublayer's last linear layer; its bias waits for the seam, where its gradient comes for free."""
        if self.training and drop.p > 0:  # dropout comes after the bias
            return self._waiting(drop(last(x_BNE)), None, scale, drop_path)
        if type(last) is FusedLinear:
            return self._waiting(last(x_BNE, add_bias=False), last.bias, scale, drop_path)
        if type(last) is nn.Linear:
            return self._waiting(F.linear(x_BNE, last.weight), last.bias, scale, drop_path)
        return self._waiting(last(x_BNE), None, scale, drop_path)  # quantized

    def _mlp(self, x_BNC: Tensor) -> Branch:
        m = self.mlp
        backend = self.ops.get("mlp", "eager")
        if type(m) is not Mlp:  # gated, or of 8-bit training: all of it is a black box
            return self._waiting(m(x_BNC), None, self.ls2, self.drop_path2)
        plain = type(m.fc1) is type(m.fc2) is nn.Linear  # not so where they were quantized since
        if backend == "eager" or not plain or (self.training and m.drop1.p > 0):
            hidden = m.norm(m.drop1(m.act(m.fc1(x_BNC))))
            return self._branch(hidden, m.fc2, m.drop2, self.ls2, self.drop_path2)
        last_bias = m.fc2.bias
        value_BNC = mlp(
            x_BNC, m.fc1.weight, m.fc1.bias, m.fc2.weight, None, _gelu_kind(m.act),
            keep_activation=self.keep_activation, backend=backend,
        )  # fmt: skip
        if self.training and m.drop2.p > 0:
            value_BNC, last_bias = m.drop2(value_BNC if last_bias is None else value_BNC + last_bias), None
        return self._waiting(value_BNC, last_bias, self.ls2, self.drop_path2)

    def _waiting(self, value_BNC: Tensor, bias_C: Tensor | None, scale: nn.Module, drop_path: nn.Module) -> Branch:
        layer_scale_C = scale.gamma if isinstance(scale, LayerScale) else None
        return Branch(value_BNC, bias_C, layer_scale_C, _sample_scale(drop_path, value_BNC))


class FusedBlocks(nn.Sequential):
    """All blocks in a row; only the last branch is added outside of a seam."""

    residual_dtype: torch.dtype | None = None  # None: the input's

    def forward(self, x_BNC: Tensor) -> Tensor:
        x_BNC, branch = x_BNC.to(self.residual_dtype or x_BNC.dtype), None
        for block in self:
            x_BNC, branch = block(x_BNC, arriving=branch, hand_on=True)
        return x_BNC if branch is None else branch.added_to(x_BNC)


def _sample_scale(drop_path: nn.Module, x_BNC: Tensor) -> Tensor | None:
    """What drop path multiplies each image's branch with; None where it does nothing."""
    if not isinstance(drop_path, DropPath) or drop_path.drop_prob == 0.0 or not drop_path.training:
        return None
    keep = 1.0 - drop_path.drop_prob
    drawn_B = torch.empty(x_BNC.shape[0], device=x_BNC.device).bernoulli_(keep)
    return drawn_B.div_(keep) if drop_path.scale_by_keep and keep > 0.0 else drawn_B


def _gelu_kind(act: nn.Module) -> str | None:
    """F.gelu's `approximate` for this activation; None for another activation."""
    if type(act) is nn.GELU:
        return act.approximate
    return {GELU: "none", GELUTanh: "tanh"}.get(type(act))


def unfusable(block: nn.Module) -> str | None:
    """Why this block's seams cannot be fused; None when they can."""
    if type(block) not in (Block, FusedBlock):
        return f"its blocks are {type(block).__name__}, not timm's pre-norm Block"
    if not (isinstance(block.attn, BackendAttention) or type(block.attn) is Attention):
        return f"its attention is {type(block.attn).__name__}, not timm's standard one"
    for norm in (block.norm1, block.norm2):
        if not isinstance(norm, nn.LayerNorm) or norm.weight is None or norm.bias is None:
            return f"it normalizes with {norm}, not with LayerNorm with weight and bias"
    for scale in (block.ls1, block.ls2):
        if not isinstance(scale, LayerScale | nn.Identity):
            return f"it scales its branches with {type(scale).__name__}"
    return None


def attention_unfusable(block: nn.Module) -> str | None:
    """Why the attention's projections cannot run as the op `linear`; None when they can."""
    attn = getattr(block, "attn", None)
    for name in ("qkv", "proj"):
        layer = getattr(attn, name, None)
        if type(layer) not in (nn.Linear, FusedLinear):
            return f"{type(block).__name__}.attn.{name} is {type(layer).__name__}, not Linear"
    return None


def mlp_unfusable(block: nn.Module) -> str | None:
    """Why this block's MLP cannot run as one op; None when it can."""
    m = block.mlp
    if type(m) is not Mlp:
        return f"its MLP is {type(m).__name__}, not linear, GELU, linear"
    for layer in (m.fc1, m.fc2):
        if type(layer) is not nn.Linear:
            return f"its MLP's layers are {type(layer).__name__}, not Linear"
    if _gelu_kind(m.act) is None:
        return f"its MLP's activation is {type(m.act).__name__}, not GELU"
    if not isinstance(m.norm, nn.Identity):
        return f"its MLP has a {type(m.norm).__name__} inside"
    return None
