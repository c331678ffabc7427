"""The parameters that FSDP replicates, so that it can gather all others in the precision to which autocast rounds them.

Autocast rounds the weights of linear layers and convolutions wherever it uses them, and their gradients: rounding them
before they travel gives the same bits. It does not round biases, norms and embeddings, and FSDP2 has one dtype for the
gradients of all parameters that it gathers together. These parameters are about 1 MB of a ViT, so they are replicated,
and their gradients averaged as DDP would.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

_ROUNDED_BY_AUTOCAST = (nn.Linear, nn.Conv2d)  # exact classes: a subclass may use its weight in another way
_MAX_REPLICATED = 0.1  # of all elements


def has_weights_in_float32(model: nn.Module) -> bool:
    """Return whether any module sets `weights_in_float32`.

    Such a module reads its weights, or those of layers in it, in float32, or gives them gradients that are not rounded,
    as the fused ops do.
    """
    return any(getattr(module, "weights_in_float32", False) for module in model.modules())


def parameters_to_replicate(model: nn.Module) -> list[nn.Parameter] | None:
    """Return the parameters that autocast does not round; None if they are too many to replicate.

    Also None if the model has weights in float32, since then a layer's class does not tell whether it is rounded.
    """
    if has_weights_in_float32(model):
        return None
    replicated = {
        parameter: None  # a dict, whose order is the same on all processes
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if name != "weight" or type(module) not in _ROUNDED_BY_AUTOCAST
    }
    few = sum(p.numel() for p in replicated) <= _MAX_REPLICATED * sum(p.numel() for p in model.parameters())
    return list(replicated) if few else None


class ReplicatedGradients:
    """Averages the gradients of replicated parameters in one all-reduce at the end of backward through `model`.

    dtype: the dtype of the all-reduce.
    last: whether the next backward pass is the last of its step; gradients accumulate locally before it.
    All processes send one tensor, so all must have gradients of the same parameters.
    """

    def __init__(self, model: nn.Module, parameters: list[nn.Parameter], dtype: torch.dtype):
        self.last, self._parameters, self._dtype = True, parameters, dtype
        model.register_forward_hook(self._expect_backward)

    def _expect_backward(self, model: nn.Module, inputs: tuple, logits: Tensor) -> None:
        """Queue the all-reduce by one hook where backward begins: cheaper on the host than one per parameter."""
        if logits.requires_grad:
            engine = torch.autograd.Variable._execution_engine
            logits.register_hook(lambda _: engine.queue_callback(self._average))

    @torch.no_grad()
    def _average(self) -> None:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not self.last or not gradients:
            return
        sums = torch.cat([gradient.flatten() for gradient in gradients]).to(self._dtype)
        dist.all_reduce(sums)
        sums /= dist.get_world_size()
        averages = sums.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [a.view_as(g) for a, g in zip(averages, gradients, strict=True)])
