"""What fsdp leaves whole on every process, so that it can gather the rest as autocast would round it.

Autocast rounds the weights of linear layers and convolutions wherever it uses them, and their gradients: rounded before
they travel, they give the same bits. Biases, norms and embeddings it does not round, and FSDP2 has one dtype for the
gradients of all that it gathers together. They are some 1 MB of a ViT: whole on every process, averaged as ddp would.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

_ROUNDED_BY_AUTOCAST = (nn.Linear, nn.Conv2d)  # and no class made of them, which may use its weight in another way
_FEW = 0.1  # of all elements


def has_weights_in_float32(model: nn.Module) -> bool:
    """Whether a module says `weights_in_float32`: it uses weights of its own, or of layers in it, as they are, or gives
    them gradients that are not rounded, as the fused operations do."""
    return any(getattr(module, "weights_in_float32", False) for module in model.modules())


def stay_whole(model: nn.Module) -> list[nn.Parameter] | None:
    """The parameters that autocast does not round; None where they are too many to be left whole.

    None too where the model has weights in float32: then no layer can be told by its class.
    """
    if has_weights_in_float32(model):
        return None
    whole = {
        parameter: None  # in the same order everywhere, as in a set it would not be
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if name != "weight" or type(module) not in _ROUNDED_BY_AUTOCAST
    }
    few = sum(p.numel() for p in whole) <= _FEW * sum(p.numel() for p in model.parameters())
    return list(whole) if few else None


class WholeGradients:
    """Averages gradients of whole parameters over all processes, as one, where a backward pass through `model` ends.

    dtype: what they are averaged in. last: whether the next backward pass is the last of its step; before it they add
    up. As all processes send one tensor, all must have gradients of the same parameters.
    """

    def __init__(self, model: nn.Module, parameters: list[nn.Parameter], dtype: torch.dtype):
        self.last, self._parameters, self._dtype = True, parameters, dtype
        model.register_forward_hook(self._expect_backward)

    def _expect_backward(self, model: nn.Module, inputs: tuple, logits: Tensor) -> None:
        """One hook where backward begins costs the host less than one at each parameter, of which it has a hundred."""
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
