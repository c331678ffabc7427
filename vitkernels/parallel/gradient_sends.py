"""Sends of gradients from inside a compiled backward pass: an operator, and the graph pass that schedules it.

An operator that takes a gradient and returns nothing keeps its place in inductor's graph, so a gradient leaves while
backward still computes others.
"""

import weakref
from typing import Protocol

import torch
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from vitkernels.bridge.operator import operator
from vitkernels.parallel import host_all_reduce
from vitkernels.parallel.compile_options import uses_cuda_graphs
from vitkernels.parallel.replicated_params import has_weights_in_float32

_NARROW = (torch.bfloat16, torch.float16)
_REORDERS_PARTITIONS = "reorder_for_reducing_graph_partitions"  # fewer CUDA graphs, by moving other operations


class Sender(Protocol):
    def gradient_computed(self, index: int, gradient: Tensor, narrow: Tensor | None) -> None: ...
    def gradient_accumulated(self, index: int, parameter: Tensor) -> None: ...


# The operator names its sender by number: a graph that held the sender itself would keep it alive.
senders: "weakref.WeakValueDictionary[int, Sender]" = weakref.WeakValueDictionary()


def can_send_between_cuda_graphs() -> bool:
    """Return whether this PyTorch leaves sends between the CUDA graphs of backward: 2.11 does, 2.9 does not."""
    return hasattr(torch._inductor.config.triton, _REORDERS_PARTITIONS)


_SCHEMA = "send_gradient(Tensor(a!) gradient, Tensor? narrow, int index, int sender) -> ()"


@operator(_SCHEMA, tags=(torch.Tag.cudagraph_unsafe,))  # a CUDA graph ends before it, and another starts after it
def send_gradient(gradient: Tensor, narrow: Tensor | None, index: int, sender: int) -> None:
    """Pass the gradient of parameter `index` to sender number `sender`.

    narrow: the bfloat16 or float16 tensor that was cast to make the gradient, if any. It may hold more numbers than the
    gradient, which can be a part of what was cast.
    The schema declares, falsely, that the gradient is written to: this keeps the call in the compiled graph and the
    gradient at its address.
    """
    senders[sender].gradient_computed(index, gradient, narrow)


@send_gradient.register_fake
def _(gradient: Tensor, narrow: Tensor | None, index: int, sender: int) -> None:
    return None


class SendInBackward(torch.autograd.Function):
    """Return the parameter; send its gradient when backward has computed it."""

    @staticmethod
    def forward(ctx, parameter: Tensor, index: int, sender: int) -> Tensor:
        ctx.index, ctx.sender = index, sender
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        gradient = gradient.contiguous()
        send_gradient(gradient, None, ctx.index, ctx.sender)
        return gradient, None, None


class ScheduleSends(CustomGraphPass):
    """Move each bucket's sends to right after its last gradient, and make them send the tensor that autocast cast.

    torch 2.9 would leave all sends at the end of backward. Scheduled by bucket, not by gradient, sends split backward
    into one CUDA graph per bucket.
    """

    def __init__(self, narrow: bool):
        self.narrow = narrow

    def __call__(self, graph: torch.fx.Graph) -> None:
        sends = graph.find_nodes(op="call_function", target=torch.ops.higher_order.auto_functionalized_v2)
        sends = [node for node in sends if node.args[0] is send_gradient.traced]
        place = {node: number for number, node in enumerate(graph.nodes)}
        sends = [node for node in sends if _gradient(node).op != "placeholder"]
        sends.sort(key=lambda node: place[_gradient(node)])  # in the order in which gradients are computed
        narrow = [_cast_source(_gradient(node)) if self.narrow else None for node in sends]
        values = [(source or _gradient(node)).meta["val"] for source, node in zip(narrow, sends, strict=True)]
        sizes, dtypes = [value.numel() for value in values], [value.dtype for value in values]
        for bucket in host_all_reduce.assign_buckets(sizes, dtypes, len(sends), [*range(len(sends))]):
            last = _gradient(sends[bucket[-1]])
            for index in bucket:
                last.append(sends[index])
                last = sends[index]
                source = narrow[index]
                if source is not None:
                    _set_narrow(sends[index], source)

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__, host_all_reduce.__file__), str(self.narrow))


def options_for_sends(options: dict, model: nn.Module) -> dict:
    """Return torch.compile's options with those that let gradients leave as soon as they are computed."""
    # Where max_autotune picks inductor's own products, the cast is fused into them and may skip the narrow rounding.
    casts_are_exact = not options.get("max_autotune")
    narrow = casts_are_exact and not has_weights_in_float32(model)
    return options | {
        "post_grad_custom_post_pass": ScheduleSends(narrow),
        "reorder_for_peak_memory": False,  # it would delay the casts that sends depend on until the end of backward
        **({f"triton.{_REORDERS_PARTITIONS}": False} if uses_cuda_graphs(options) else {}),
        # A gradient is a graph output and keeps its memory, but its cast source would be reused by the graph's next
        # operation while the copy engine reads it. Without reuse it returns to the allocator once nothing refers to
        # it. That costs the host some 300 allocations per step of a ViT-B.
        "allow_buffer_reuse": not narrow,
    }


def _gradient(send: torch.fx.Node) -> torch.fx.Node:
    return send.all_input_nodes[0]


def _set_narrow(send: torch.fx.Node, narrow: torch.fx.Node) -> None:
    send.update_kwarg("narrow", narrow)
    if "eager_input_vals" in send.meta:  # inductor builds the call from it
        args, kwargs = send.meta["eager_input_vals"]
        send.meta["eager_input_vals"] = args, {**kwargs, "narrow": narrow.meta["val"]}


def _cast_source(gradient: torch.fx.Node) -> torch.fx.Node | None:
    """Return the narrow tensor that a float32 gradient is a cast of, if it holds all its numbers in the same order."""
    if gradient.target is not torch.ops.prims.convert_element_type.default:
        return None
    source = gradient.args[0]
    assert isinstance(source, torch.fx.Node)  # the tensor that is cast
    narrow = source.meta["val"]
    is_view = source.target is torch.ops.aten.reshape.default or getattr(source.target, "is_view", False)
    is_free = source.op == "call_function" and list(source.users) == [gradient] and not is_view  # never written to
    return source if is_free and narrow.dtype in _NARROW and narrow.is_contiguous() else None
