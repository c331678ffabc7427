"""Swap a model's layers for quantized ones and back, in place."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from vitkernels.errors import UsageError, unknown_name
from vitkernels.module_swap import original_class
from vitkernels.ops.eight_bit_format import FEATURE_MULTIPLE
from vitkernels.quant.inference_modules import QuantizedEmbedding, QuantizedLinear
from vitkernels.quant.schemes import Scheme
from vitkernels.quant.training_modules import DTYPES, EightBitLinear, EightBitMlp, can_be_eight_bit_mlp

Filter = Callable[[str, nn.Module], bool]


def quantize_(
    model: nn.Module, scheme: Scheme | str, filter: Filter | None = None, *, backend: str = "auto"
) -> nn.Module:
    """Swap every nn.Linear and nn.Embedding for its quantized form, in place, and return the model.

    The model must be on a real device, and afterwards be called under torch.no_grad(). A layer used in two places stays
    shared. To load a checkpoint of a quantized model, build the model, call `quantize_` with the same arguments, then
    load_state_dict.

    Args:
        scheme: a Scheme or its name as Scheme.named accepts it: "w8a8", "w4a16_block", "w8a8_fp8".
        filter: called with each layer's name and the layer; False leaves the layer unquantized.
        backend: of the op quantized_matmul.

    Raises:
        UsageError: before anything is swapped. "quant.scheme" for an unknown scheme, "quant.block_size" if the block
            size does not divide a layer's in features, "quant.no_layers", "quant.bare_layer", "quant.eight_bit_model"
            for a model that trains in 8 bits.
    """
    scheme = Scheme.named(scheme) if isinstance(scheme, str) else scheme
    layers = _select(model, (nn.Linear, nn.Embedding), filter)
    _check_block_size(layers, scheme)
    _swap(model, layers.items(), lambda layer: _quantized(layer, scheme, backend))
    return model


def dequantize_(model: nn.Module) -> nn.Module:
    """Swap every quantized layer for a float layer with the dequantized weights, in place, and return the model.

    State-dict names are those from before `quantize_`.
    """
    layers: list[tuple[str, Any]] = [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, QuantizedLinear | QuantizedEmbedding)
    ]
    _swap(model, layers, _dequantized)
    return model


def train_in_8_bits(model: nn.Module, dtype: str, filter: Filter | None = None) -> nn.Module:
    """Make every nn.Linear compute its products in 8 bits, forward and backward, in place, and return the model.

    Parameters keep their identity and names: an existing optimizer stays valid, and checkpoints load into the plain
    model. A module of two linear layers with only a GELU between them (fc1, act, fc2, such as timm's Mlp) becomes one.

    Args:
        dtype: "int8" or "fp8". fp8 on a GPU needs compute capability 8.9; CPUs emulate both, slowly.
        filter: called with each layer's name and the layer; False leaves the layer unchanged.

    Raises:
        UsageError: before anything is swapped. "unknown_name" for the dtype, "quant.features" for layers whose features
            are not multiples of 16, "quant.no_layers", "quant.bare_layer", "quant.eight_bit_model" for a model that
            trains in 8 bits already.
    """
    if dtype not in DTYPES:
        raise unknown_name("8-bit dtype", dtype, DTYPES)
    layers: Mapping[str, Any] = _select(model, (nn.Linear,), filter)
    odd = [n for n, m in layers.items() if m.in_features % FEATURE_MULTIPLE or m.out_features % FEATURE_MULTIPLE]
    if odd:
        raise UsageError(
            f"8-bit products require features in multiples of {FEATURE_MULTIPLE}; exclude these layers with the "
            f"filter: {', '.join(odd)}",
            code="quant.features",
            layers=odd,
        )
    mlps = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if can_be_eight_bit_mlp(module) and {f"{name}.fc1", f"{name}.fc2"} <= layers.keys()
    }
    for name, mlp in mlps.items():
        model.set_submodule(name, EightBitMlp(mlp, DTYPES[dtype]))
    inside = {f"{name}.{child}" for name in mlps for child in ("fc1", "fc2")}
    for name, linear in layers.items():
        if name not in inside:
            model.set_submodule(name, EightBitLinear.from_module(linear, eight_bit=DTYPES[dtype]))
    return model


@torch.no_grad()
def size_in_bytes(model: nn.Module) -> int:
    """Return the memory of parameters and buffers, each counted once."""
    tensors = {*model.parameters(), *model.buffers()}
    return sum(t.numel() * t.element_size() for t in tensors)


def _select(model: nn.Module, classes: tuple[type[nn.Module], ...], filter: Filter | None) -> dict[str, nn.Module]:
    """Return the layers of these classes that the filter accepts, by name; a shared layer has several names."""
    _check_has_no_eight_bit_layers(model)
    layers = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if original_class(module) in classes and (filter is None or filter(name, module))
    }
    kind = type(model).__name__
    if not layers:
        names = " or ".join(f"nn.{cls.__name__}" for cls in classes)
        raise UsageError(f"{kind} has no {names} that the filter accepts", code="quant.no_layers", model=kind)
    if "" in layers:
        message = f"{kind} is itself a layer, and only layers inside a model can be swapped in place"
        raise UsageError(f"{message}: wrap it in nn.Sequential", code="quant.bare_layer", model=kind)
    return layers


def _check_has_no_eight_bit_layers(model: nn.Module) -> None:
    """Reject 8-bit training modules: quantizing the layers inside them would make them read integers as weights."""
    found = next((n for n, m in model.named_modules() if isinstance(m, EightBitLinear | EightBitMlp)), None)
    if found is not None:
        raise UsageError(
            f"{found or type(model).__name__} already trains in 8 bits; build the model again and load this one's "
            "state_dict, whose names are those of the plain model",
            code="quant.eight_bit_model",
            layer=found,
        )


def _check_block_size(layers: Mapping[str, Any], scheme: Scheme) -> None:
    if scheme.block_size == -1:
        return
    widths = {n: m.in_features if isinstance(m, nn.Linear) else m.embedding_dim for n, m in layers.items()}
    odd = {name: width for name, width in widths.items() if width % scheme.block_size}
    if odd:
        example_of = {width: name for name, width in reversed(odd.items())}
        listed = ", ".join(f"{width} (e.g. {name})" for width, name in sorted(example_of.items()))
        raise UsageError(
            f"block_size {scheme.block_size} does not divide the in features {listed}; choose another block size, or "
            "exclude these layers with the filter",
            code="quant.block_size",
            block_size=scheme.block_size,
            layers=odd,
        )


def _dequantized(layer: Any) -> nn.Module:
    return layer.dequantize()


def _quantized(layer: nn.Module, scheme: Scheme, backend: str) -> nn.Module:
    if isinstance(layer, nn.Linear):
        return QuantizedLinear.of(layer, scheme, backend)
    assert isinstance(layer, nn.Embedding)  # `_select` chose both
    return QuantizedEmbedding.of(layer, scheme)


def _swap(model: nn.Module, layers: Iterable[tuple[str, nn.Module]], replace: Callable[[nn.Module], nn.Module]) -> None:
    """Replace each named layer by `replace(layer)`; a shared layer is replaced once and stays shared."""
    replaced: dict[nn.Module, nn.Module] = {}
    for name, layer in layers:
        if layer not in replaced:
            replaced[layer] = replace(layer)
        model.set_submodule(name, replaced[layer])
