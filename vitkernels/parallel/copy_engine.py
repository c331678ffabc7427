"""Data parallelism by the GPUs' copy engines: each rank's gradients go through host memory to all others.

A copy engine moves bytes without the multiprocessors, which NCCL's kernels would share with backward's matrix products.
Gradients therefore leave while backward computes others, even from inside one compiled graph. Afterwards each rank
averages what all have sent, in rank order, so all get the same bits. Averaging follows Li et al., "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training" (arXiv:2006.15704).
"""

import functools
import itertools
import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitkernels import torchrun_environment
from vitkernels.errors import UsageError
from vitkernels.parallel.compile_options import uses_cuda_graphs
from vitkernels.parallel.gradient_sends import (
    SendInBackward,
    can_send_between_cuda_graphs,
    options_for_sends,
    senders,
)
from vitkernels.parallel.host_all_reduce import HostAllReduce
from vitkernels.parallel.replicated_params import has_weights_in_float32

_SMALL_GRADIENT = 2**15  # elements; smaller gradients, such as biases, travel in one bucket at the end
_MEASURED_WORLD = 2
_MAX_MEMORY_SHARE = 0.05  # of a GPU's memory, for received gradients with send="auto"

log = logging.getLogger("vitkernels")

_numbers = itertools.count()

# (shapes, dtypes, number of the first small gradient, order in which the others were sent) -> HostAllReduce.
MakeAllReduce = Callable[[list[torch.Size], list[torch.dtype], int, list[int]], HostAllReduce]


def unsupported(device: torch.device, world: int, reduce_dtype: torch.dtype) -> str | None:
    """Return why this process's gradients cannot travel by copy engines; None if they can."""
    if device.type != "cuda":
        return f"it needs NVIDIA GPUs, and the device is {device.type}"
    if torchrun_environment.local_world_size(world) != world:
        return "it uses the memory of one host, and torchrun started processes on several"
    if reduce_dtype != torch.float32:
        return "it averages in float32 (reduce='fp32')"
    return None


def unsupported_model(model: nn.Module, options: dict | None, overlap: bool) -> str | None:
    """Return why this model's gradients cannot travel by copy engines; None if they can."""
    for name, p in model.named_parameters():
        if p.requires_grad and (p.dtype != torch.float32 or not p.is_contiguous()):
            kind = f"{'' if p.is_contiguous() else 'non-contiguous '}{p.dtype}"
            return f"it needs contiguous float32 parameters, and {name} is {kind}"
    if overlap and uses_cuda_graphs(options) and not can_send_between_cuda_graphs():
        return (
            f"PyTorch {torch.__version__} would send all gradients after the CUDA graphs of this compile mode. Use "
            "torch 2.11, the default mode, max-autotune-no-cudagraphs, or overlap=False, which sends after backward"
        )
    return None


def not_measured_faster(
    model: nn.Module, world: int, options: dict | None, overlap: bool, accum_steps: int, device: torch.device
) -> str | None:
    """Return why send="auto" prefers NCCL although copy engines could send; None if it does not (notes/parallel.md)."""
    if options is None or not overlap:
        return "measured only for compiled models and during backward"
    if accum_steps > 1:
        return f"measured only with one micro-batch per step, not with accum_steps={accum_steps}"
    if world != _MEASURED_WORLD:
        return f"measured only on {_MEASURED_WORLD} GPUs, not on {world}"
    if has_weights_in_float32(model) and not uses_cuda_graphs(options):
        return (
            "float32 gradients, as fused ops produce them, measured slower without CUDA graphs, and faster with "
            "torch.compile's mode reduce-overhead"
        )
    received = 4 * world * sum(p.numel() for p in model.parameters() if p.requires_grad)
    if received > _MAX_MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory:
        return f"they would take {received / 2**30:.1f} GiB of each GPU's memory (send='copy' allows that)"
    return None


def _on_gradient_accumulated(sender: int, index: int, parameter: Tensor) -> None:
    if sender in senders:
        senders[sender].gradient_accumulated(index, parameter)


class CopyEngineDataParallel(nn.Module):
    """Wrap `model` so that its gradients after a backward pass are the means over all ranks.

    make_all_reduce: builds the HostAllReduce for gradients of these shapes and dtypes; a dtype is float32 if any rank
        requests that.
    overlap: send during backward, not after it.
    options: for torch.compile; None runs the model eagerly.
    last: whether the next backward pass is the last of its step; gradients are averaged after that one.
    late: how many of the last step's large gradients were not sent from inside the compiled graph.
    Raises UsageError after a backward pass that leaves a trainable parameter without a gradient.
    """

    def __init__(
        self, model: nn.Module, make_all_reduce: MakeAllReduce, overlap: bool = True, options: dict | None = None
    ):
        super().__init__()
        self.module, self.overlap, self.last, self.late = model, overlap, True, 0
        self._is_open = False  # whether the last pass of a step is in progress
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._trained_by_name = dict(sorted(trained, key=lambda one: one[1].numel() < _SMALL_GRADIENT))
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            dist.broadcast(tensor.detach(), 0)
        self._has_buffers = next(model.buffers(), None) is not None  # too slow on the host to repeat at each step
        self._trained = list(self._trained_by_name.values())
        self._large = sum(p.numel() >= _SMALL_GRADIENT for p in self._trained)  # large parameters come first
        # Built after the first backward pass, which shows how gradients travel.
        self._make_all_reduce = make_all_reduce
        self._all_reduce: HostAllReduce | None = None
        # index -> (gradient, tensor that travels for it). Both keep their memory until all ranks have read it.
        self._sent: dict[int, tuple[Tensor, Tensor]] = {}
        self._finish_is_queued = False
        self._number = next(_numbers)
        senders[self._number] = self
        for index, p in enumerate(self._trained):
            # By number: a hook with a reference to self would form a cycle that Python's collector cannot free.
            p.register_post_accumulate_grad_hook(functools.partial(_on_gradient_accumulated, self._number, index))
        self._run = self._run_plain
        if options is not None and overlap:
            self._run = torch.compile(self._run_sending, options=options_for_sends(options, model))
        elif options is not None:
            self._run = torch.compile(self._run_plain, options=options)

    def forward(self, *inputs):
        if self._has_buffers and self.training and torch.is_grad_enabled():
            for buffer in self.module.buffers():
                dist.broadcast(buffer, 0)
        return self._run(*inputs)

    def _run_plain(self, *inputs):
        return self.module(*inputs)

    def _run_sending(self, *inputs):
        if not torch.is_grad_enabled():
            return self.module(*inputs)
        large = itertools.islice(self._trained_by_name.items(), self._large)
        sending = {name: SendInBackward.apply(p, i, self._number) for i, (name, p) in enumerate(large)}
        return torch.func.functional_call(self.module, sending, inputs)

    def begin(self, last: bool) -> None:
        """Call on all ranks before forward and backward of each micro-batch.

        A pass aborted by an error is discarded. If the error was on some ranks only, all must have begun the same pass,
        and it must be the last of a step and not the first ever.
        """
        if self._is_open or self._sent or self._finish_is_queued:
            self._abort()
        self.last = self._is_open = last

    def _abort(self) -> None:
        if self._all_reduce is not None:
            self._all_reduce.abort()
        self._reset()

    def _reset(self) -> None:
        self._sent.clear()
        self._finish_is_queued = self._is_open = False

    def gradient_computed(self, index: int, gradient: Tensor, narrow: Tensor | None) -> None:
        """Send a gradient before autograd assigns it to its parameter, unless it will be added to an earlier one."""
        if narrow is not None and narrow.shape != gradient.shape:
            narrow = None
        if self.last and index not in self._sent and self._trained[index].grad is None:
            self._send(index, gradient, narrow)

    def gradient_accumulated(self, index: int, parameter: Tensor) -> None:
        """Send a gradient that has accumulated over this backward pass and earlier ones of the same step."""
        if not self.last:
            return
        if not self._finish_is_queued:
            self._finish_is_queued, self.late = True, 0
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if index >= self._large:
            return
        # _sent keeps the tensor alive, so an equal address means that it is the same tensor and nothing was added.
        (sent, _), gradient = self._sent.get(index, (None, None)), parameter.grad  # None if the graph does not use it
        if self.overlap and gradient is not None and (sent is None or sent.data_ptr() != gradient.data_ptr()):
            self._send(index, gradient)
            self.late += 1

    def _send(self, index: int, gradient: Tensor, narrow: Tensor | None = None) -> None:
        all_reduce = self._all_reduce
        agreed = None if all_reduce is None else all_reduce.dtypes[index]
        # Detached: with a second reference to the gradient autograd would copy it instead of assigning it.
        gradient = gradient.detach()
        travels = gradient if narrow is None or agreed == torch.float32 else narrow.detach()
        self._sent[index] = gradient, travels
        if all_reduce is not None and travels.dtype == agreed:
            all_reduce.send(index, travels)

    @torch.no_grad()
    def _finish(self) -> None:
        """After backward, send the rest and assign the averages."""
        try:
            self._send_rest()
        except Exception:
            self._abort()
            raise
        all_reduce = self._all_reduce
        assert all_reduce is not None  # _send_rest made it
        all_reduce.finish()
        self._reset()  # all sends are complete
        for p, average in zip(self._trained, all_reduce.averages(), strict=True):
            p.grad = average

    def _send_rest(self) -> None:
        self._check_no_gradient_is_missing()
        for index, p in enumerate(self._trained[: self._large]):
            if index not in self._sent:
                assert p.grad is not None  # checked above
                self._send(index, p.grad)
                self.late += 1
        self._match_dtypes()
        assert self._all_reduce is not None
        for index in range(self._large, len(self._trained)):
            gradient = self._trained[index].grad
            assert gradient is not None
            self._all_reduce.send(index, gradient)

    def _match_dtypes(self) -> None:
        """Build a new all-reduce if gradients travelled in other dtypes than before.

        Dtypes change on all ranks in the same pass, as all run the same program. A gradient that once travelled in
        float32, as a sum over micro-batches does, keeps doing so.
        """
        dtypes = [self._sent[index][1].dtype for index in range(self._large)]
        dtypes += [torch.float32] * (len(self._trained) - self._large)
        if self._all_reduce is not None:
            if dtypes == self._all_reduce.dtypes:
                return
            log.info("copy engines: from now on, more gradients are sent in float32")
            self._all_reduce.abort()
            self._all_reduce = None  # frees its memory before the next one allocates
        shapes = [p.shape for p in self._trained]
        self._all_reduce = self._make_all_reduce(shapes, dtypes, self._large, list(self._sent))
        sent, self._sent = self._sent, {}
        for index, (gradient, travels) in sent.items():
            self._send(index, gradient, travels)
        self.late = self._large

    def _check_no_gradient_is_missing(self) -> None:
        missing = [name for name, p in self._trained_by_name.items() if p.grad is None]
        if missing:
            others = f" and {len(missing) - 1} others" if missing[1:] else ""
            raise UsageError(
                f"send='copy' averages the gradients of all trainable parameters, but backward produced none for "
                f"{missing[0]}{others}: freeze parameters that the model does not use with requires_grad_(False)",
                code="parallel.missing_gradients",
                names=missing,
            )
