"""Data parallelism by the GPUs' copy engines: each rank's gradients go through the host's memory to all others.

A copy engine moves bytes beside the multiprocessors, which NCCL's kernels would share with backward's products. So
gradients leave while backward makes others, also from within one compiled graph; after it each rank takes the mean of
what all have sent, in the order of the ranks, and so to the same bits. The averages are those of Li et al., "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training" (arXiv:2006.15704).
"""

import functools
import itertools
import logging
import os
import weakref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from vitkernels.bridge.operator import operator
from vitkernels.errors import UsageError
from vitkernels.parallel import host_all_reduce
from vitkernels.parallel.replicated_params import has_weights_in_float32

_NARROW = (torch.bfloat16, torch.float16)
_SMALL = 2**15  # elements: smaller gradients, biases and the like, go side by side, as one, at the end
_MEASURED_WORLD = 2
_PUTS_OFF = "reorder_for_reducing_graph_partitions"  # what is in no CUDA graph, which makes fewer of them
_MOST_MEMORY = 0.05  # of a GPU's, that auto takes for what is received

log = logging.getLogger("vitkernels")

_numbers = itertools.count()
_senders: "weakref.WeakValueDictionary[int, CopiedGradients]" = weakref.WeakValueDictionary()  # for send_gradient


def unsupported(device: torch.device, world: int, reduce_dtype: torch.dtype) -> str | None:
    """Why this process's gradients cannot travel by copy engines; None if they can."""
    if device.type != "cuda":
        return f"it is for NVIDIA GPUs, and this is runtime={device.type}"
    if int(os.environ.get("LOCAL_WORLD_SIZE", world)) != world:
        return "it goes through the memory of one host, and torchrun started processes on several"
    if reduce_dtype != torch.float32:
        return "it averages in float32 (parallel.reduce=fp32)"
    return None


def unfit(model: nn.Module, options: dict | None, beside: bool) -> str | None:
    """Why the gradients of this model cannot travel by copy engines; None if they can. See CopiedGradients."""
    for name, p in model.named_parameters():
        if p.requires_grad and (p.dtype != torch.float32 or not p.is_contiguous()):
            kind = f"{'' if p.is_contiguous() else 'not contiguous '}{p.dtype}"
            return f"it is for contiguous float32 parameters, and {name} is {kind}"
    if beside and has_cuda_graphs(options) and not sends_between_cuda_graphs():
        return (
            f"PyTorch {torch.__version__} would send all of it behind the CUDA graphs of this compile mode: "
            "torch 2.11 does not; or compile=true, compile=max-autotune-no-cudagraphs, or parallel.overlap=false, "
            "which sends after backward"
        )
    return None


def sends_between_cuda_graphs() -> bool:
    """Whether this PyTorch lets what is sent beside backward stay between its CUDA graphs. 2.11 does, 2.9 does not."""
    return hasattr(torch._inductor.config.triton, _PUTS_OFF)


def has_cuda_graphs(options: dict | None) -> bool:
    """Whether these options of torch.compile make it record and replay CUDA graphs."""
    return bool(options and options.get("triton.cudagraphs"))


def not_measured_faster(
    model: nn.Module, world: int, options: dict | None, beside: bool, accum_steps: int, device: torch.device
) -> str | None:
    """Why parallel.send=auto leaves them to NCCL all the same; None if it does not. See notes/parallel.md."""
    if options is None or not beside:
        return "measured for compiled models, and beside backward"
    if accum_steps > 1:
        return f"measured with one batch a step, not with trainer.accum_steps={accum_steps}"
    if world != _MEASURED_WORLD:
        return f"measured on {_MEASURED_WORLD} GPUs, not on {world}"
    if has_weights_in_float32(model) and not has_cuda_graphs(options):
        return (
            "float32 gradients, as the fused operations give them, measured slower without CUDA graphs, and faster "
            "with compile=reduce-overhead"
        )
    received = 4 * world * sum(p.numel() for p in model.parameters() if p.requires_grad)
    if received > _MOST_MEMORY * torch.cuda.get_device_properties(device).total_memory:
        return f"they would take {received / 2**30:.1f} GiB of each GPU's memory (parallel.send=copy lets them)"
    return None


# ---------------------------------------------------------------------- gradients, on their way out of backward


_SCHEMA = "send_gradient(Tensor(a!) gradient, Tensor? narrow, int index, int sender) -> ()"


@operator(_SCHEMA, tags=(torch.Tag.cudagraph_unsafe,))  # a CUDA graph ends before it, and another begins behind it
def send_gradient(gradient: Tensor, narrow: Tensor | None, index: int, sender: int) -> None:
    """Tell the CopiedGradients of number `sender` that its parameter `index` has this gradient.

    narrow: in bfloat16 or float16, the numbers from which the gradient was made, if there is such a tensor; they may be
    more than the gradient's, which can be a part of what was cast.
    It writes nothing. That it says so keeps it in the compiled graph, and the gradient where it is.
    """
    _senders[sender].is_made(index, gradient, narrow)


@send_gradient.register_fake
def _(gradient: Tensor, narrow: Tensor | None, index: int, sender: int) -> None:
    return None


def _gradient_is_added(sender: int, index: int, parameter: Tensor) -> None:
    if sender in _senders:
        _senders[sender].is_added(index, parameter)


class _Watched(torch.autograd.Function):
    """The parameter; its gradient is sent when backward comes by."""

    @staticmethod
    def forward(ctx, parameter: Tensor, index: int, sender: int) -> Tensor:
        ctx.index, ctx.sender = index, sender
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        gradient = gradient.contiguous()
        send_gradient(gradient, None, ctx.index, ctx.sender)
        return gradient, None, None


class _SendAtOnce(CustomGraphPass):
    """Moves send_gradients to where the last gradient is made that travels with theirs, at the end of all else in torch
    2.9, and has them send what autocast cast to make them.

    So the groups of an Exchange, and not single gradients, are what the CUDA graphs of a backward pass end with.
    """

    def __init__(self, narrow: bool):
        self.narrow = narrow

    def __call__(self, graph: torch.fx.Graph) -> None:
        sends = graph.find_nodes(op="call_function", target=torch.ops.higher_order.auto_functionalized_v2)
        sends = [node for node in sends if node.args[0] is send_gradient.traced]
        place = {node: number for number, node in enumerate(graph.nodes)}
        sends = [node for node in sends if _gradient(node).op != "placeholder"]
        sends.sort(key=lambda node: place[_gradient(node)])  # as gradients are made
        narrow = [_cast_from(_gradient(node)) if self.narrow else None for node in sends]
        values = [(of or _gradient(node)).meta["val"] for of, node in zip(narrow, sends, strict=True)]
        sizes, dtypes = [value.numel() for value in values], [value.dtype for value in values]
        for group in host_all_reduce.grouped(sizes, dtypes, len(sends), [*range(len(sends))]):
            behind = _gradient(sends[group[-1]])
            for index in group:
                behind.append(sends[index])
                behind = sends[index]
                if narrow[index] is not None:
                    _give_narrow(sends[index], narrow[index])

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__, host_all_reduce.__file__), str(self.narrow))


def _gradient(send: torch.fx.Node) -> torch.fx.Node:
    return send.all_input_nodes[0]


def _give_narrow(send: torch.fx.Node, narrow: torch.fx.Node) -> None:
    send.update_kwarg("narrow", narrow)
    if "eager_input_vals" in send.meta:  # from which inductor makes the call
        args, kwargs = send.meta["eager_input_vals"]
        send.meta["eager_input_vals"] = args, {**kwargs, "narrow": narrow.meta["val"]}


def _cast_from(gradient: torch.fx.Node) -> torch.fx.Node | None:
    """What a float32 gradient is a cast of, if half the bytes have all its numbers, in the same order."""
    if gradient.target is not torch.ops.prims.convert_element_type.default:
        return None
    source = gradient.args[0]
    narrow = source.meta["val"]
    is_view = source.target is torch.ops.aten.reshape.default or getattr(source.target, "is_view", False)
    is_free = source.op == "call_function" and list(source.users) == [gradient] and not is_view  # nobody writes into it
    return source if is_free and narrow.dtype in _NARROW and narrow.is_contiguous() else None


def _at_once(options: dict, model: nn.Module) -> dict:
    """torch.compile's options, and what lets gradients leave where they are made."""
    # Where inductor's own products win, the cast behind them is theirs, and need not go through the narrow numbers.
    casts_are_exact = not options.get("max_autotune")
    narrow = casts_are_exact and not has_weights_in_float32(model)
    return options | {
        "post_grad_custom_post_pass": _SendAtOnce(narrow),
        "reorder_for_peak_memory": False,  # it would put off what makes a gradient ready to be sent, until the end
        **({f"triton.{_PUTS_OFF}": False} if has_cuda_graphs(options) else {}),
        # A gradient is a result, whose memory stays. What it was cast from goes back to the allocator, once nobody
        # refers to it, and not to the graph's next operation. That costs the host some 300 allocations in a ViT-B.
        "allow_buffer_reuse": not narrow,
    }


class CopiedGradients(nn.Module):
    """`model`, whose gradients after a backward pass are the means over all ranks.

    connect: makes the Exchange of gradients of these shapes and dtypes, in float32 where any rank asks for it, from the
    number of the first small one, and from the order in which the others were sent.
    beside: send beside backward, not after it.
    options: for torch.compile; None runs the model as it is.
    last: whether the next backward pass is the last of its step, after which gradients are averaged.
    late: how many of the last step's gradients that are not small were not sent from within the compiled graph.
    A backward pass after which a parameter to train has no gradient raises UsageError.
    """

    def __init__(self, model: nn.Module, connect, beside: bool = True, options: dict | None = None):
        super().__init__()
        self.module, self.beside, self.last, self.late = model, beside, True, 0
        self._is_open = False  # begun as the last pass of a step, and not at its end
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._named = dict(sorted(trained, key=lambda one: one[1].numel() < _SMALL))
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            dist.broadcast(tensor.detach(), 0)
        self._has_buffers = next(model.buffers(), None) is not None  # to look at each step takes the host a while
        self._trained = list(self._named.values())
        self._large = sum(p.numel() >= _SMALL for p in self._trained)  # which come first
        self._connect, self._exchange = connect, None  # until a first backward pass has shown how gradients travel
        # Gradients, by index, and what travels for each. They keep their memory until all have been read.
        self._sent: dict[int, tuple[Tensor, Tensor]] = {}
        self._expects_end = False
        self._number = next(_numbers)
        _senders[self._number] = self
        for index, p in enumerate(self._trained):
            # By number: a parameter that held what holds it would keep all of it, beyond Python's garbage collection.
            p.register_post_accumulate_grad_hook(functools.partial(_gradient_is_added, self._number, index))
        self._run = self._as_it_is
        if options is not None and beside:
            self._run = torch.compile(self._watched, options=_at_once(options, model))
        elif options is not None:
            self._run = torch.compile(self._as_it_is, options=options)

    def forward(self, *inputs):
        if self._has_buffers and self.training and torch.is_grad_enabled():
            for buffer in self.module.buffers():
                dist.broadcast(buffer, 0)
        return self._run(*inputs)

    def _as_it_is(self, *inputs):
        return self.module(*inputs)

    def _watched(self, *inputs):
        if not torch.is_grad_enabled():
            return self.module(*inputs)
        large = itertools.islice(self._named.items(), self._large)
        watched = {name: _Watched.apply(p, i, self._number) for i, (name, p) in enumerate(large)}
        return torch.func.functional_call(self.module, watched, inputs)

    def begin(self, last: bool) -> None:
        """Before forward and backward of one of a step's batches, on all ranks.

        A pass that an error ended is forgotten. For an error on some ranks only, all must have begun the same pass, as
        the last of a step, and not as the first one ever.
        """
        if self._is_open or self._sent or self._expects_end:
            self._break_off()
        self.last = self._is_open = last

    def _break_off(self) -> None:
        if self._exchange is not None:
            self._exchange.break_off()
        self._forget()

    def _forget(self) -> None:
        self._sent.clear()
        self._expects_end = self._is_open = False

    def is_made(self, index: int, gradient: Tensor, narrow: Tensor | None) -> None:
        """Send a gradient before it is its parameter's, unless others are still to be added to it."""
        if narrow is not None and narrow.shape != gradient.shape:
            narrow = None
        if self.last and index not in self._sent and self._trained[index].grad is None:
            self._send(index, gradient, narrow)

    def is_added(self, index: int, parameter: Tensor) -> None:
        """A parameter has the gradient of this backward pass, and of those before it in the same step."""
        if not self.last:
            return
        if not self._expects_end:
            self._expects_end, self.late = True, 0
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        if index >= self._large:
            return
        # What was sent is kept: so nothing was added to it in place, and nothing else has its address.
        (sent, _), gradient = self._sent.get(index, (None, None)), parameter.grad  # None of what a graph does not use
        if self.beside and gradient is not None and (sent is None or sent.data_ptr() != gradient.data_ptr()):
            self._send(index, gradient)
            self.late += 1

    def _send(self, index: int, gradient: Tensor, narrow: Tensor | None = None) -> None:
        agreed = None if self._exchange is None else self._exchange.dtypes[index]
        # Views: with another reference to the gradient itself autograd would copy it into the parameter's.
        gradient = gradient.detach()
        travels = gradient if narrow is None or agreed == torch.float32 else narrow.detach()
        self._sent[index] = gradient, travels
        if travels.dtype == agreed:
            self._exchange.send(index, travels)

    @torch.no_grad()
    def _end(self) -> None:
        """After backward: send the rest, and give all parameters the averages."""
        try:
            self._send_rest()
        except Exception:
            self._break_off()
            raise
        self._exchange.end()
        self._forget()  # all that was sent has left
        for p, average in zip(self._trained, self._exchange.averages(), strict=True):
            p.grad = average

    def _send_rest(self) -> None:
        self._check_all_are_there()
        for index, p in enumerate(self._trained[: self._large]):
            if index not in self._sent:
                self._send(index, p.grad)
                self.late += 1
        self._agree()
        for index in range(self._large, len(self._trained)):
            self._exchange.send(index, self._trained[index].grad)

    def _agree(self) -> None:
        """On an Exchange for this pass's dtypes, which change on all ranks in the same pass: they run the same program.

        A gradient that once travelled in float32, as sums of several batches do, does so ever after.
        """
        dtypes = [self._sent[index][1].dtype for index in range(self._large)]
        dtypes += [torch.float32] * (len(self._trained) - self._large)
        if self._exchange is not None:
            if dtypes == self._exchange.dtypes:
                return
            log.info("parallel.send: from now on more gradients travel in float32")
            self._exchange.break_off()
            self._exchange = None  # gives its memory back before there is more
        self._exchange = self._connect([p.shape for p in self._trained], dtypes, self._large, list(self._sent))
        sent, self._sent = self._sent, {}
        for index, (gradient, travels) in sent.items():
            self._send(index, gradient, travels)
        self.late = self._large

    def _check_all_are_there(self) -> None:
        missing = [name for name, p in self._named.items() if p.grad is None]
        if missing:
            others = f" and {len(missing) - 1} more have" if missing[1:] else " has"
            raise UsageError(
                f"parallel.send=copy averages the gradients of all parameters, and {missing[0]}{others} none after "
                "this backward pass: if the model does not use it, freeze it with requires_grad_(False)"
            )
