"""The adapter of each attention class, and the classes that no backend can compute, with the reason.

The tables hold names instead of classes, because versions of timm differ. To support a class, write its adapter and add
a line.
"""

from torch import nn

from vitkernels.models.adapters.cross_attention import (
    ClassAttention,
    FeatureMapPooling,
    GatedPositionalAttention,
    LatentPooling,
    MaskUnitAttention,
    MultiQueryAttention,
    MultiScaleAttention,
    PaddedWindowAttention,
    PatchPooling,
    PixelAttention,
    PooledKeyAttention,
    PooledQueryAttention,
    RotaryFeatureMapPooling,
    SubsampledAttention,
)
from vitkernels.models.adapters.multihead import MultiheadAttention
from vitkernels.models.adapters.relative_bias import (
    BeitAttention,
    CascadedAttention,
    ChannelsLastBiasAttention,
    CosineWindowAttention,
    CrossStageCosineWindowAttention,
    DownsamplingAttention,
    FeatureMapBiasAttention,
    GlobalQueryAttention,
    MaskedFeatureMapAttention,
    RelPosAttention,
    WideValueAttention,
    WindowAttention,
)
from vitkernels.models.adapters.rotary_attention import EvaAttention, Gemma4Attention, RotaryAttention, SamAttention
from vitkernels.models.adapters.self_attention import (
    DifferentialAttention,
    DifferentialParallelBlockAttention,
    FeatureMapAttention,
    GridAttention,
    ImageBlockAttention,
    PackedAttention,
    PackedFeatureMapAttention,
    ParallelBlockAttention,
    SelfAttention,
)
from vitkernels.models.backend_attention import BackendAttention

ADAPTERS: dict[str, type[BackendAttention]] = {
    "timm.layers.attention.Attention": SelfAttention,
    "timm.layers.attention.AttentionRope": RotaryAttention,
    "timm.layers.attention2d.Attention2d": MaskedFeatureMapAttention,
    "timm.layers.attention2d.MultiQueryAttention2d": MultiQueryAttention,
    "timm.layers.attention_pool.AttentionPoolLatent": LatentPooling,
    "timm.layers.attention_pool.AttentionPoolPrr": PatchPooling,
    "timm.layers.attention_pool2d.AttentionPool2d": FeatureMapPooling,
    "timm.layers.attention_pool2d.RotAttentionPool2d": RotaryFeatureMapPooling,
    "timm.layers.diff_attention.DiffAttention": DifferentialAttention,
    "timm.models.beit.Attention": BeitAttention,
    "timm.models.cait.ClassAttn": ClassAttention,
    "timm.models.convit.GPSA": GatedPositionalAttention,
    "timm.models.convit.MHSA": PackedAttention,
    "timm.models.crossvit.CrossAttention": ClassAttention,
    "timm.models.davit.WindowAttention": PackedAttention,
    "timm.models.efficientformer.Attention": WideValueAttention,
    "timm.models.efficientvit_msra.CascadedGroupAttention": CascadedAttention,
    "timm.models.eva.EvaAttention": EvaAttention,
    "timm.models.fastvit.Attention": FeatureMapAttention,
    "timm.models.gcvit.WindowAttentionGlobal": GlobalQueryAttention,
    "timm.models.gemma4_vit.Gemma4Attention": Gemma4Attention,
    "timm.models.hiera.MaskUnitAttention": MaskUnitAttention,
    "timm.models.hieradet_sam2.MultiScaleAttention": PooledQueryAttention,
    "timm.models.levit.Attention": WideValueAttention,
    "timm.models.levit.AttentionDownsample": DownsamplingAttention,
    "timm.models.maxxvit.Attention2d": FeatureMapBiasAttention,
    "timm.models.maxxvit.AttentionCl": ChannelsLastBiasAttention,
    "timm.models.metaformer.Attention": PackedAttention,
    "timm.models.mvitv2.MultiScaleAttention": MultiScaleAttention,
    "timm.models.nest.Attention": ImageBlockAttention,
    "timm.models.nextvit.EfficientAttention": PooledKeyAttention,
    "timm.models.pvt_v2.Attention": SubsampledAttention,
    "timm.models.swin_transformer.WindowAttention": WindowAttention,
    "timm.models.swin_transformer_v2.WindowAttention": CosineWindowAttention,
    "timm.models.swin_transformer_v2_cr.WindowMultiHeadAttention": CrossStageCosineWindowAttention,
    "timm.models.tiny_vit.Attention": WideValueAttention,
    "timm.models.tnt.Attention": PixelAttention,
    "timm.models.twins.GlobalSubSampleAttn": SubsampledAttention,
    "timm.models.twins.LocallyGroupedAttn": PaddedWindowAttention,
    "timm.models.visformer.Attention": PackedFeatureMapAttention,
    "timm.models.vision_transformer.DiffParallelScalingBlock": DifferentialParallelBlockAttention,
    "timm.models.vision_transformer.ParallelScalingBlock": ParallelBlockAttention,
    "timm.models.vision_transformer_relpos.RelPosAttention": RelPosAttention,
    "timm.models.vision_transformer_sam.Attention": SamAttention,
    "timm.models.volo.Attention": GridAttention,
    "timm.models.volo.ClassAttention": ClassAttention,
    "torch.nn.modules.activation.MultiheadAttention": MultiheadAttention,
}

_CHANNELS = "it attends between channels: its head dim would be the number of tokens"
_MIXES_HEADS = "it mixes the heads' scores before the softmax, so no head can be computed alone"
_LINEAR = "it has no softmax over pairs of tokens"
_NO_ADAPTER = "vitkernels has no adapter for it"

REFUSED: dict[str, str] = {
    "timm.layers.bottleneck_attn.BottleneckAttn": "its bias depends on q, and it has no adapter",
    "timm.layers.halo_attn.HaloAttn": "its blocks overlap, and its bias depends on q",
    "timm.layers.lambda_layer.LambdaLayer": _LINEAR,
    "timm.models.cait.TalkingHeadAttn": _MIXES_HEADS,
    "timm.models.coat.FactorAttnConvRelPosEnc": "its softmax runs over the keys alone, before the product with q",
    "timm.models.cpubone.ConvAttention": _NO_ADAPTER,
    "timm.models.csatv2.SpatialTransformerBlock": "timm computes its scores between the images of a batch",
    "timm.models.davit.ChannelAttention": _CHANNELS,
    "timm.models.davit.ChannelAttentionV2": _CHANNELS,
    "timm.models.edgenext.CrossCovarianceAttn": _CHANNELS,
    "timm.models.efficientformer_v2.Attention2d": _MIXES_HEADS,
    "timm.models.efficientformer_v2.Attention2dDownsample": _MIXES_HEADS,
    "timm.models.efficientvit_mit.LiteMLA": _LINEAR,
    "timm.models.iformer.SHMA": _NO_ADAPTER,
    "timm.models.lowformer.ConvAttention": _NO_ADAPTER,
    "timm.models.mobilevit.LinearSelfAttention": _LINEAR,
    "timm.models.mvitv2.MultiScaleAttentionPoolFirst": _NO_ADAPTER,
    "timm.models.nextvit.ConvAttention": "it is a convolution",
    "timm.models.shvit.SHSA": _NO_ADAPTER,
    "timm.models.swiftformer.EfficientAdditiveAttention": _LINEAR,
    "timm.models.volo.OutlookAttention": "a linear layer predicts its weights; it has no queries and keys",
    "timm.models.xcit.XCA": _CHANNELS,
}


def class_name(module: nn.Module) -> str:
    """Return the qualified name of the module's class, as the tables list it."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def refusal(module: nn.Module) -> str | None:
    """Return why an attention module cannot be replaced; None if it can."""
    if isinstance(module, BackendAttention):
        return None
    name = class_name(module)
    if name in ADAPTERS:
        return ADAPTERS[name].unsupported(module)
    return REFUSED.get(name, _NO_ADAPTER)
