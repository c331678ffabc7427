"""Swapping a model's layers for quantized ones and back, in place."""

from collections.abc import Callable

import torch
from torch import nn

from vitkernels.errors import UsageError
from vitkernels.module_swap import original_class
from vitkernels.quant.modules import QuantizedEmbedding, QuantizedLinear
from vitkernels.quant.schemes import Scheme
from vitkernels.quant.training import check_is_float

Filter = Callable[[str, nn.Module], bool]


def quantize_(
    model: nn.Module, scheme: Scheme | str, filter: Filter | None = None, *, backend: str = "auto"
) -> nn.Module:
    """Swap every nn.Linear and nn.Embedding for its quantized form, in place; returns the model.

    scheme: a Scheme or its name, as Scheme.named takes it: "w8a8", "w4a16_block", "w8a8_fp8".
    filter: called with a layer's name and itself; where it says no, the layer stays. By default all are quantized.
    backend: quantized_matmul's.

    The model must be on a real device, and is then called under torch.no_grad(). A layer used in two places stays one.
    For a checkpoint written after this, make the model, `quantize_` it the same way, and load_state_dict.

    Raises UsageError before anything is swapped: for an unknown scheme, a block size that does not divide a layer's in
    features (the layers are named), when nothing is left to quantize, or for a model that trains in 8 bits.
    """
    scheme = Scheme.named(scheme) if isinstance(scheme, str) else scheme
    check_is_float(model)
    chosen = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if original_class(module) in (nn.Linear, nn.Embedding) and (filter is None or filter(name, module))
    }
    if not chosen:
        raise UsageError(f"{type(model).__name__} has no nn.Linear or nn.Embedding that the filter lets through")
    if "" in chosen:
        raise UsageError("a bare layer cannot be swapped in place: use QuantizedLinear.of or QuantizedEmbedding.of")
    if scheme.block_size != -1:
        odd = {name: size for name, m in chosen.items() if (size := _width(m)) % scheme.block_size}
        if odd:
            first = {size: name for name, size in reversed(odd.items())}
            named = ", ".join(f"{size} (as of {name})" for size, name in sorted(first.items()))
            raise UsageError(
                f"block_size {scheme.block_size} does not divide the in features {named}; choose another, or leave "
                "these layers out with the filter (train.py: quant.skip, by the end of their names)"
            )
    made: dict[nn.Module, nn.Module] = {}
    for name, module in chosen.items():
        if module not in made:
            is_linear = isinstance(module, nn.Linear)
            made[module] = (
                QuantizedLinear.of(module, scheme, backend) if is_linear else QuantizedEmbedding.of(module, scheme)
            )
        model.set_submodule(name, made[module])
    return model


def dequantize_(model: nn.Module) -> nn.Module:
    """Swap every quantized layer for a float one with the values that it stands for, in place; returns the model.

    State-dict names are then those from before `quantize_`; the values are rounded ones.
    """
    made: dict[nn.Module, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            made.setdefault(module, module.dequantize())
            model.set_submodule(name, made[module])
    return model


@torch.no_grad()
def size_in_bytes(model: nn.Module) -> int:
    """What parameters and buffers take, each counted once."""
    tensors = {*model.parameters(), *model.buffers()}
    return sum(t.numel() * t.element_size() for t in tensors)


def _width(module: nn.Module) -> int:
    return module.in_features if isinstance(module, nn.Linear) else module.embedding_dim
