"""timm's blocks, projections and patch embedding, rewritten over fused ops; same parameters and state-dict keys.

A FusedBlock computes each residual addition together with the LayerNorm that follows it. A sublayer's result therefore
stays separate from the residual stream until the next LayerNorm, which may be in the next block.

Shape suffixes: B images, N tokens, C channels, E channels of the sublayer or the patch embedding, H x W pixels,
P patch size.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from timm.layers import DropPath, GluMlp, LayerScale, Mlp, SwiGLU
from timm.layers.activations import GELU, GELUTanh
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from vitkernels.models.fused_linear import FusedLinear, joined_linear, joined_product
from vitkernels.module_swap import SwappedModule
from vitkernels.ops import layer_norm_residual, mlp, norm_linear, norm_mlp, patch_embed, swiglu_norm
from vitkernels.registry.op import op_of, place_of

# Gated MLPs (Shazeer 2020, arXiv 2002.05202) -> their linear layers.
GATED_MLPS = {SwiGLU: ("fc1_g", "fc1_x", "fc2"), GluMlp: ("fc1", "fc2")}


class Branch(NamedTuple):
    """A sublayer's result, with the operations to apply before it is added to the residual stream.

    A tuple, because FSDP searches a block's arguments and results for tensors.
    """

    value_BNC: Tensor
    bias_C: Tensor | None
    layer_scale_C: Tensor | None
    sample_scale_B: Tensor | None

    def added_to(self, x_BNC: Tensor) -> Tensor:
        """Return x + (value + bias) * layer scale * sample scale."""
        value = self.value_BNC
        if self.bias_C is not None:
            value = value + self.bias_C
        if self.layer_scale_C is not None:
            value = value * self.layer_scale_C
        if self.sample_scale_B is not None:
            value = value * self.sample_scale_B.view(-1, *[1] * (value.ndim - 1))
        return x_BNC + value


class ResidualFusion:
    """Base of fused blocks: additions joined with norms, an MLP whose last bias is added with the branch.

    ops: op name -> backend. layer_norm_residual is required; without mlp, the MLP runs as timm's modules.
    keep_activation: option of the op mlp.
    """

    ops: Mapping[str, str]
    keep_activation: bool
    if TYPE_CHECKING:  # not at run time: annotations are the settings
        training: bool
        attn: Any
        norm1: Any
        norm2: Any
        mlp: Any
        drop_path1: Any
        drop_path2: Any

    @property
    def weights_in_float32(self) -> bool:
        """Whether weight gradients are float32 under autocast, as those of the op mlp are."""
        return self.ops.get("mlp", "eager") != "eager"

    def _add_and_norm(self, x_BNC: Tensor, branch: Branch | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
        """Return x + branch and its LayerNorm."""
        value, extras = _operands(branch)
        backend = self.ops["layer_norm_residual"]
        return layer_norm_residual(x_BNC, value, norm.weight, norm.bias, norm.eps, **extras, backend=backend)

    def _project(
        self, x_BNE: Tensor, last: nn.Linear, drop: nn.Dropout, scale_C: Tensor | None, drop_path: nn.Module
    ) -> Branch:
        """Apply the sublayer's last linear layer, without its bias.

        layer_norm_residual adds the bias: its backward pass then computes the bias gradient at no extra cost.
        """
        if self.training and drop.p > 0:  # dropout follows the bias
            return plain_branch(drop(last(x_BNE)), None, scale_C, drop_path)
        if type(last) is FusedLinear or _eight_bit(last) is not None:
            return plain_branch(last(x_BNE, add_bias=False), last.bias, scale_C, drop_path)
        if type(last) is nn.Linear:
            return plain_branch(F.linear(x_BNE, last.weight), last.bias, scale_C, drop_path)
        return plain_branch(last(x_BNE), None, scale_C, drop_path)  # quantized

    def _fuses_mlp(self) -> bool:
        """Return whether the op mlp computes the MLP."""
        m = self.mlp
        if self.ops.get("mlp", "eager") == "eager" or type(m) is not Mlp:  # gated, or an EightBitMlp: opaque
            return False
        plain = type(m.fc1) is type(m.fc2) is nn.Linear  # false if they were quantized after set_ops
        return plain and not (self.training and m.drop1.p > 0)

    def _mlp(self, x_BNC: Tensor) -> Branch:
        m = self.mlp
        if self._fuses_mlp():
            return self._mlp_branch(mlp(
                x_BNC, m.fc1.weight, m.fc1.bias, m.fc2.weight, None,
                gelu_kind(m.act),  # type: ignore[arg-type]  # set_ops refuses other activations
                keep_activation=self.keep_activation, backend=self.ops["mlp"],
            ))  # fmt: skip
        if type(m) in GATED_MLPS:
            return self._gated_mlp(x_BNC)
        if type(m) is not Mlp:
            return plain_branch(m(x_BNC), None, layer_scale(self, 2), self.drop_path2)
        hidden = m.norm(m.drop1(m.act(m.fc1(x_BNC))))
        return self._project(hidden, m.fc2, m.drop2, layer_scale(self, 2), self.drop_path2)  # type: ignore[arg-type]  # Linear

    def _mlp_branch(self, value_BNC: Tensor) -> Branch:
        """Return the branch of an MLP whose last bias is not yet added."""
        m = self.mlp
        last_bias = m.fc2.bias
        if self.training and hasattr(m, "drop2") and m.drop2.p > 0:
            value_BNC, last_bias = m.drop2(value_BNC if last_bias is None else value_BNC + last_bias), None
        return plain_branch(value_BNC, last_bias, layer_scale(self, 2), self.drop_path2)

    def _gated_mlp(self, x_BNC: Tensor) -> Branch:
        """Run a gated MLP with one input product and, if the op swiglu_norm fits, one pass between its products."""
        m = self.mlp
        layers = [getattr(m, name) for name in GATED_MLPS[type(m)][:-1]]
        gate_last = type(m) is GluMlp and m.gate_last
        if self._fuses_swiglu_norm(x_BNC):
            product, bias_G = joined_product(x_BNC, *layers)
            norm = (m.norm.weight, m.norm.bias, m.norm.eps) if has_affine_norm(m) else ()
            options: dict[str, Any] = {"gate_last": gate_last, "backend": self.ops["layer_norm_residual"]}
            hidden = swiglu_norm(product, *norm, linear_bias_G=bias_G, **options)
        else:
            gate, value = joined_linear(x_BNC, *layers).chunk(2, dim=-1)[:: -1 if gate_last else 1]
            hidden = m.drop1(m.act(gate) * value)
            hidden = self._add_and_norm(hidden, None, m.norm)[1] if has_affine_norm(m) else m.norm(hidden)
        return self._project(hidden, m.fc2, m.drop2, layer_scale(self, 2), self.drop_path2)

    def _fuses_swiglu_norm(self, x_BNC: Tensor) -> bool:
        """Return whether the op swiglu_norm computes the hidden features of a gated MLP.

        It needs a backend of the name that is chosen for layer_norm_residual.
        """
        m, op = self.mlp, op_of(swiglu_norm)
        name = self.ops["layer_norm_residual"]
        known = place_of(x_BNC.device.type) in op.auto if name == "auto" else name in op.names()
        fits = type(m.act) is nn.SiLU and (type(m.norm) is nn.Identity or has_affine_norm(m))
        return known and fits and not (self.training and m.drop1.p > 0)


class FusedBlock(SwappedModule, Block, ResidualFusion):
    """timm's Block with fused residual additions; it can return its last branch instead of adding it.

    On a TPU one kernel computes a LayerNorm and the product that follows it, if its op is selected too or it is in
    8 bits. For the settings see ResidualFusion.
    """

    if TYPE_CHECKING:  # not at run time: annotations are the settings
        attn: Any
        norm1: Any
        norm2: Any
        mlp: Any

    def forward(
        self,
        x_BNC: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        branch: Branch | None = None,
        return_branch: bool = False,
        only_first: bool = False,
    ) -> Tensor | tuple[Tensor, Branch]:
        """Apply timm's block to x + branch.

        Returns the residual stream (B, N, C); with only_first, that of the first token (B, 1, C); with return_branch,
        the stream and the MLP's branch, not yet added.
        """
        if self._joins("linear", getattr(self.attn, "qkv", None), x_BNC) and not self.attn.has_gate:
            x_BNC, qkv_BNF = self._add_norm_and_qkv(x_BNC, branch)
            attended_BNC = self.attn.attend_packed(qkv_BNF, attn_mask, is_causal)
        else:
            x_BNC, normed_BNC = self._add_and_norm(x_BNC, branch, self.norm1)
            attended_BNC = self.attn.attend(normed_BNC, attn_mask, is_causal)
        if only_first:
            return self._finish_first(x_BNC, attended_BNC)
        branch = self._project(attended_BNC, self.attn.proj, self.attn.proj_drop, layer_scale(self, 1), self.drop_path1)
        if self._joins("mlp", self.mlp, x_BNC):
            x_BNC, branch = self._add_norm_and_mlp(x_BNC, branch)
        else:
            x_BNC, normed_BNC = self._add_and_norm(x_BNC, branch, self.norm2)
            branch = self._mlp(normed_BNC)
        if not return_branch:
            return branch.added_to(x_BNC)
        # FSDP frees a block's parameters when the block returns, so the next block gets copies.
        bias_C, layer_scale_C = (None if p is None else p.clone() for p in (branch.bias_C, branch.layer_scale_C))
        return x_BNC, branch._replace(bias_C=bias_C, layer_scale_C=layer_scale_C)

    def _finish_first(self, x_BNC: Tensor, attended_BNE: Tensor) -> Tensor:
        """Return the first token's residual stream (B, 1, C), computed by timm's modules: one row is little work."""
        x_B1C, attended_B1E = x_BNC[:, :1], attended_BNE[:, :1]
        proj = self.attn.proj
        projected = F.linear(attended_B1E, proj.weight, proj.bias) if type(proj) is FusedLinear else proj(attended_B1E)
        projected = self.attn.proj_drop(projected)
        x_B1C = plain_branch(projected, None, layer_scale(self, 1), self.drop_path1).added_to(x_B1C)
        value_B1C = self.mlp(self.norm2(x_B1C))
        return plain_branch(value_B1C, None, layer_scale(self, 2), self.drop_path2).added_to(x_B1C)

    def _joins(self, op: str, layer: nn.Module | None, x_BNC: Tensor) -> bool:
        """Return whether a kernel computes the LayerNorm together with the first product of `layer`."""
        backends = {self.ops["layer_norm_residual"]}
        if _eight_bit(layer) is None:
            if not (self._fuses_mlp() if op == "mlp" else type(layer) is FusedLinear):
                return False
            backends.add(self.ops.get(op, "eager"))
        if not backends <= {"auto", "pallas_tpu"}:
            return False
        return backends == {"pallas_tpu"} or place_of(x_BNC.device.type) == "tpu"

    def _add_norm_and_qkv(self, x_BNC: Tensor, branch: Branch | None) -> tuple[Tensor, Tensor]:
        """Return x + branch and attention's projection of its LayerNorm."""
        value, extras = _operands(branch)
        norm, qkv = self.norm1, self.attn.qkv
        eight_bit = _eight_bit(qkv)
        backend = self.ops["linear" if eight_bit is None else "layer_norm_residual"]
        return norm_linear(
            x_BNC, value, norm.weight, norm.bias, qkv.weight, qkv.bias, norm.eps,
            **extras, is_qkv=eight_bit is None and qkv.is_qkv, eight_bit=eight_bit, backend=backend,
        )  # fmt: skip

    def _add_norm_and_mlp(self, x_BNC: Tensor, branch: Branch) -> tuple[Tensor, Branch]:
        """Return x + branch and the MLP of its LayerNorm."""
        value, extras = _operands(branch)
        norm, m = self.norm2, self.mlp
        eight_bit = _eight_bit(m)
        backend = self.ops["mlp" if eight_bit is None else "layer_norm_residual"]
        x_BNC, value_BNC = norm_mlp(
            x_BNC, value, norm.weight, norm.bias, m.fc1.weight, m.fc1.bias, m.fc2.weight,
            gelu_kind(m.act), norm.eps,  # type: ignore[arg-type]  # set_ops refuses other activations
            **extras, keep_activation=self.keep_activation, eight_bit=eight_bit, backend=backend,
        )  # fmt: skip
        return x_BNC, self._mlp_branch(value_BNC)


class FusedBlocks(nn.Sequential):
    """A sequence of FusedBlocks; only the last branch is added without a LayerNorm.

    residual_dtype: dtype of the residual stream; None for that of the input.
    """

    residual_dtype: torch.dtype | None = None

    def forward(self, x_BNC: Tensor, only_first: bool = False) -> Tensor:
        """Return the last block's residual stream (B, N, C); with only_first, that of the first token (B, 1, C)."""
        x_BNC, branch = x_BNC.to(self.residual_dtype or x_BNC.dtype), None
        for block in [*self][:-1] if only_first else self:
            x_BNC, branch = block(x_BNC, branch=branch, return_branch=True)
        if only_first:
            return self[-1](x_BNC, branch=branch, only_first=True)
        return x_BNC if branch is None else branch.added_to(x_BNC)


class ClassTokenViT(SwappedModule, VisionTransformer):
    """timm's VisionTransformer over FusedBlocks, without what the logits do not depend on.

    If the head reads only the first token, the last block's projection and MLP and the final norm run on that token
    alone. forward_features and forward_intermediates still return all tokens. timm's forward runs if the blocks or
    forward_features were replaced since.
    """

    if TYPE_CHECKING:  # not at run time: annotations are the settings
        blocks: Any

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        reads_first = self.global_pool == "token" and self.attn_pool is None
        replaced = not isinstance(self.blocks, FusedBlocks) or "forward_features" in self.__dict__
        if not reads_first or replaced or attn_mask is not None or is_causal or self.grad_checkpointing:
            return super().forward(x, attn_mask=attn_mask, is_causal=is_causal)
        embedded_BNC = self.norm_pre(self.patch_drop(self._pos_embed(self.patch_embed(x))))
        return self.forward_head(self.norm(self.blocks(embedded_BNC, only_first=True)))


class FusedPatchConv(SwappedModule, nn.Conv2d):
    """A convolution over non-overlapping patches as one matrix product, over the op `patch_embed`."""

    backend: str

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, E, H / P, W / P): a view of (B, N, E), which timm's flatten and transpose restore."""
        tokens_BNE = patch_embed(images_BCHW, self.weight, self.bias, backend=self.backend)
        rows = images_BCHW.shape[2] // self.stride[0]
        return tokens_BNE.transpose(1, 2).unflatten(2, (rows, -1))


def _operands(branch: Branch | None) -> tuple[Tensor | None, dict[str, Tensor | None]]:
    """Return the branch of layer_norm_residual and its keywords for the operations on it."""
    if branch is None:
        return None, {}
    return branch.value_BNC, {
        "branch_bias_C": branch.bias_C,
        "layer_scale_C": branch.layer_scale_C,
        "sample_scale_B": branch.sample_scale_B,
    }


def plain_branch(
    value_BNC: Tensor, bias_C: Tensor | None, layer_scale_C: Tensor | None, drop_path: nn.Module
) -> Branch:
    return Branch(value_BNC, bias_C, layer_scale_C, _sample_scale(drop_path, value_BNC))


def has_affine_norm(mlp: Any) -> bool:
    """Return whether the MLP's norm is a LayerNorm with weight and bias."""
    return isinstance(mlp.norm, nn.LayerNorm) and mlp.norm.weight is not None and mlp.norm.bias is not None


def layer_scale(block: Any, sublayer: int) -> Tensor | None:
    """Return the factors of sublayer 1 (attention) or 2 (MLP): a LayerScale, or a parameter of EVA's and BEiT's."""
    module = getattr(block, f"ls{sublayer}", None)
    return module.gamma if isinstance(module, LayerScale) else getattr(block, f"gamma_{sublayer}", None)


def _sample_scale(drop_path: nn.Module, x_BNC: Tensor) -> Tensor | None:
    """Return drop path's random factor for each image's branch; None if drop path is inactive."""
    if not isinstance(drop_path, DropPath) or drop_path.drop_prob == 0.0 or not drop_path.training:
        return None
    keep = 1.0 - drop_path.drop_prob
    drawn_B = torch.empty(x_BNC.shape[0], device=x_BNC.device).bernoulli_(keep)
    return drawn_B.div_(keep) if drop_path.scale_by_keep and keep > 0.0 else drawn_B


def _eight_bit(layer: nn.Module | None) -> torch.dtype | None:
    """Return the dtype of the products of a layer that trains in 8 bits (vitkernels.quant); None for other layers."""
    return getattr(layer, "eight_bit", None)


def gelu_kind(act: nn.Module) -> str | None:
    """Return F.gelu's `approximate` for a GELU module; None for any other activation."""
    if type(act) is nn.GELU:
        return act.approximate
    return {GELU: "none", GELUTanh: "tanh"}.get(type(act))
