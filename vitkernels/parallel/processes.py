"""Several processes, one device each, started by torchrun: DistributedDataParallel and FSDP2.

Sources: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (arXiv:2006.15704);
Zhao et al., "PyTorch FSDP" (arXiv:2304.11277), in its second form, torch.distributed.fsdp.fully_shard.
"""

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from vitkernels.errors import UsageError
from vitkernels.parallel import copy_engine, host_all_reduce, host_memory
from vitkernels.parallel.base import Parallel
from vitkernels.parallel.heartbeat import Watch
from vitkernels.parallel.host_memory import HostRows
from vitkernels.parallel.local_shards import ELEMENTWISE, part_of, parts_of, step_on_dtensors, step_on_parts
from vitkernels.parallel.replicated_params import WholeGradients, stay_whole
from vitkernels.runtime import Runtime
from vitkernels.runtime.base import PRECISIONS

log = logging.getLogger("vitkernels")

_LARGE_BUCKET = 128  # MB: few calls, and one can be copied together while the one before is sent


class Group(Parallel):
    """Processes that talk through gloo, on the host: through the device they would wait for all it was given.

    A subclass calls _join once it knows its rank and world.
    """

    def _join(self, backend: str, watch: Watch, **keywords) -> None:
        dist.init_process_group(backend, rank=self.rank, world_size=self.world, **keywords)
        self._host = dist.new_group(backend="gloo")
        self.checkpoint_group = None if self.one_program else dist.new_group(backend="gloo")
        self._vote: tuple[dist.Work, Tensor] | None = None
        self._watch = watch
        watch.start()

    @contextlib.contextmanager
    def _leaving_on_errors(self) -> Iterator[None]:
        """Around what a constructor does once it has joined: the others must hear of an error in it, too."""
        try:
            yield
        except Exception as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def agree(self, asked: bool) -> bool:
        """The votes of the step before: those are in by now, so that nothing waits for them."""
        agreed = False
        if self._vote is not None:
            work, votes = self._vote
            work.wait()
            agreed = bool(votes)
        votes = torch.tensor(int(asked))
        self._vote = dist.all_reduce(votes, group=self._host, async_op=True), votes
        return agreed

    def gather(self, value) -> list:
        values = [None] * self.world
        dist.all_gather_object(values, value, group=self._host)
        return values

    def on_main(self, function: Callable, *args):
        result, error = None, None
        if self.is_main:
            try:
                result = function(*args)
            except Exception as raised:
                error = raised
        shared = [result, error is not None]
        dist.broadcast_object_list(shared, src=0, group=self._host)
        if error is not None:
            raise error
        if shared[1]:
            raise UsageError("ended by what rank 0 reports")
        return shared[0]

    def __exit__(self, kind, error, trace) -> None:
        if error is None or isinstance(error, SystemExit):
            self.runtime.synchronize()  # what the others wait for has left
            self._watch.stop()  # before all meet: nobody is missed who was allowed to go
            self.gather(None)  # dist.barrier asks for an accelerator, and fails where that is torch_xla's
            dist.destroy_process_group()
        elif getattr(error, "on_every_rank", False):
            self._watch.fail_alike(error)
        else:
            # A peer that died breaks our connection to it first: then the watch ends us before it is our error.
            self._watch.fail(error)


class Processes(Group):
    """The process group that torchrun described in the environment, and what both ways to train in it share.

    overlap: talk beside the work, block by block, each block compiled by itself; or in one piece before and after it,
    the model compiled as a whole. None: beside it on several hosts. Seen on 4 H200s with a ViT-B under fsdp with
    gather=bf16: NCCL ran 1.7 ms of a step of 50, and matrix products that share the GPU with it take up to 1.9 times as
    long.
    reduce: the precision that gradients are averaged in.
    """

    def __init__(self, runtime: Runtime, lost_after: float, overlap: bool | None = None, reduce: str = "fp32"):
        super().__init__(runtime)
        self.device = runtime.device
        self.rank, self.world = dist_environment()
        one_host = int(os.environ.get("LOCAL_WORLD_SIZE", self.world)) == self.world
        self.overlap = not one_host if overlap is None else overlap
        self.reduce_dtype = PRECISIONS[reduce]
        on_gpu = self.device.type == "cuda"
        self._join(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            Watch(self.rank, self.world, lost_after, (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))),
            store=_store_of_this_attempt(),
            device_id=self.device if on_gpu else None,
        )

    def describe(self) -> str:
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        when = "beside" if self.overlap else "after"
        return f"{self.name}, {self.world} processes, {backend}, gradients averaged {when} backward"

    def _compile(self, model: nn.Module, mode: str | None) -> None:
        """In place, and within the hooks by which the processes talk, which stay outside what is compiled."""
        torch._dynamo.config.optimize_ddp = False  # would cut the model where its gradients are sent
        limit = torch._dynamo.config.recompile_limit  # of one piece of code, which all blocks share but for drop path
        torch._dynamo.config.recompile_limit = max(limit, 4 * len(model.blocks))
        for module in model.blocks if self.overlap else [model]:
            module.forward = torch.compile(module.forward, mode=mode)


def _store_of_this_attempt() -> dist.Store:
    """torchrun's store outlives a restart: under the old keys the new processes would wait at dead addresses."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store, _, _ = next(dist.rendezvous("env://"))
    return dist.PrefixStore(f"attempt_{attempt}", store)


class Ddp(Processes):
    """Each process has the whole model; gradients are averaged.

    send: how gradients travel. nccl: by NCCL. copy: by the GPUs' copy engines, through the memory of their host, in
    float32 or in what holds the same numbers, beside backward though the model is compiled as a whole, or, with
    overlap=False, after it; see copied.py. auto: by the copy engines where that measured faster, else by NCCL, on CPUs
    by gloo; the log says which, and why.
    accum_steps: batches to a step.
    """

    name = "ddp"

    def __init__(
        self,
        runtime: Runtime,
        lost_after: float,
        overlap: bool | None = None,
        reduce: str = "fp32",
        send: str = "auto",
        accum_steps: int = 1,
    ):
        device, self.send, self.copies_beside = runtime.device, send, overlap is not False
        self.accum_steps = accum_steps
        if send == "nccl" and device.type != "cuda":
            raise UsageError(f"parallel.send=nccl is for NVIDIA GPUs, and this is {device.type}: parallel.send=auto")
        self._may_copy = send == "copy" or (send == "auto" and device.type == "cuda")
        self._no_copies = None  # or why not
        self._said = None
        if self._may_copy:
            self._no_copies = copy_engine.unsupported(device, dist_environment()[1], PRECISIONS[reduce])
            self._refuse_copies(self._no_copies)
        super().__init__(runtime, lost_after, False if send == "copy" else overlap, reduce)
        with self._leaving_on_errors():
            if self._may_copy:
                self._no_copies = self._first(self._no_copies)
                if self._no_copies is None:
                    self._no_copies = self._first(host_memory.unavailable(self.rank, device, self.gather))
                self._refuse_copies(self._no_copies)

    def _first(self, reason: str | None) -> str | None:
        """Of all ranks' reasons, so that all do the same."""
        return next(filter(None, self.gather(reason)), None)

    def _refuse_copies(self, reason: str | None) -> None:
        if reason and self.send == "copy":
            raise UsageError(f"parallel.send=copy cannot be had: {reason}; parallel.send=auto does without")

    def describe(self) -> str:
        if not self._may_copy:
            return super().describe()
        when = "beside" if self.copies_beside else "after"
        how = f", copy engines, gradients sent {when} backward" if self.send == "copy" else ""  # auto: `wrap` says it
        return f"{self.name}, {self.world} processes{how}"

    def wrap(self, model: nn.Module, compiled: bool = False, mode: str | None = None) -> nn.Module:
        is_trained = any(p.requires_grad for p in model.parameters())
        if self._may_copy and is_trained and self._copies(model, compiled, mode):
            return self._copied(model, compiled, mode)
        if compiled:
            self._compile(model, mode)
        if not is_trained:  # a model that is only evaluated
            return model
        net = DistributedDataParallel(
            model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            bucket_cap_mb=None if self.overlap else _LARGE_BUCKET,
        )
        if self.reduce_dtype == torch.bfloat16:
            net.register_comm_hook(None, bf16_compress_hook)
        return net

    def _copies(self, model: nn.Module, compiled: bool, mode: str | None) -> bool:
        """Whether this model's gradients go by the copy engines; the log says why not."""
        options = _options(compiled, mode)
        reason = self._no_copies or copy_engine.unfit(model, options, self.copies_beside)
        self._refuse_copies(reason)
        if self.send == "auto":
            reason = reason or copy_engine.not_measured_faster(
                model, self.world, options, self.copies_beside, self.accum_steps, self.device
            )
            reason = self._first(reason)  # GPUs can have different memories
            when = "beside" if self.overlap else "after"
            how = f"nccl, {when} backward; not by copy engines: {reason}" if reason else "copy engines, beside backward"
            if how != self._said:  # as of the model whose weights are averages of this one's
                log.info("parallel.send=auto: gradients by %s", how)
            self._said = how
        return reason is None

    def _copied(self, model: nn.Module, compiled: bool, mode: str | None) -> nn.Module:
        def connect(shapes: list[torch.Size], dtypes: list[torch.dtype], first_small: int, order: list[int]):
            # Inductor pads a product where that is faster, which each rank times by itself; then it is another tensor.
            by_rank, orders = zip(*self.gather((dtypes, order)), strict=True)
            dtypes = [max(of_one, key=lambda dtype: dtype.itemsize) for of_one in zip(*by_rank, strict=True)]
            sizes = [shape.numel() for shape in shapes]
            groups = host_all_reduce.grouped(sizes, dtypes, first_small, orders[0])
            length, flags = host_all_reduce.row_bytes(sizes, dtypes), host_all_reduce.number_of_flags(groups)
            made, failure = None, None
            try:
                host = HostRows(length, flags, self.rank, self.device, self.gather)
                made = host_all_reduce.Exchange(shapes, dtypes, groups, host)
            except (OSError, RuntimeError) as error:
                failure = str(error).splitlines()[0]
            if failure := self._first(failure):
                raise UsageError(
                    f"no {self.world * length / 2**30:.1f} GiB of host memory, and as much of each GPU's, for the "
                    f"gradients of all ranks: {failure}; parallel.send=nccl does without"
                )
            return made

        return copy_engine.CopiedGradients(model, connect, self.copies_beside, _options(compiled, mode))

    @contextlib.contextmanager
    def accumulating(self, net: nn.Module, last: bool) -> Iterator[None]:
        if not isinstance(net, DistributedDataParallel):
            net.begin(last)
            yield
            return
        with contextlib.nullcontext() if last else net.no_sync():
            yield


def _options(compiled: bool, mode: str | None) -> dict | None:
    """torch.compile's, of one of its modes; None where the model is not compiled."""
    if not compiled:
        return None
    return torch._inductor.list_mode_options(mode) if mode else {}


class Fsdp(Processes):
    """Each process has a part of every parameter, gradient and optimizer state, and gathers the rest to run it.

    gather: the precision that parameters are gathered in. fp32: what is calculated, and in which precision, is what one
    process does. auto: the same bits, at half the bytes where precision is bf16: weights that autocast would round are
    rounded before they travel, and the few other parameters are not shared out (whole.py). In fp16, whose GradScaler
    takes no mix of parts and whole tensors, and for layers that autocast does not round, such as those that multiply in
    8 bits, auto is fp32. bf16: all parameters are rounded before they are used, also those that autocast would leave in
    float32, and the residual stream, which has its dtype from the position embedding, becomes bfloat16.
    (To keep the stream alone in float32 does not do: LayerNorm on CPUs takes no weights narrower than its input.)
    reshard: give a block's other parts back between forward and backward, and gather them twice; this takes blocks, and
    so overlap.
    """

    name = "fsdp"

    def __init__(
        self,
        runtime: Runtime,
        lost_after: float,
        overlap: bool | None = None,
        reduce: str = "fp32",
        gather: str = "auto",
        reshard: bool = False,
    ):
        super().__init__(runtime, lost_after, reshard or overlap, reduce)
        self.gather_precision = gather
        self.reshard = reshard
        with self._leaving_on_errors():
            self.mesh = dist.device_mesh.init_device_mesh(self.device.type, (self.world,), mesh_dim_names=("data",))
        self._rounds: bool | None = None  # whether gather=auto has found that it can round; None before the first model

    def wrap(self, model: nn.Module, compiled: bool = False, mode: str | None = None) -> nn.Module:
        whole = self._whole(model)
        gathers_rounded = whole is not None or self.gather_precision == "bf16"
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if gathers_rounded else None,
            reduce_dtype=self.reduce_dtype,
            cast_forward_inputs=False,
        )
        settings = {
            "mesh": self.mesh,
            "mp_policy": policy,
            "reshard_after_forward": self.reshard,
            "ignored_params": None if whole is None else set(whole),
        }
        if copy_engine.has_cuda_graphs(_options(compiled, mode)):
            raise UsageError(
                f"compile={mode} is for other engines than fsdp: with its CUDA graphs a step of fsdp took 4.5 times as "
                "long as without; compile=true, compile=max-autotune-no-cudagraphs, or parallel=ddp"
            )
        if compiled:
            self._compile(model, mode)
        for block in model.blocks if self.overlap else ():
            fully_shard(block, **settings)
        net = fully_shard(model, **settings)
        net.whole_gradients = WholeGradients(net, whole or [], self.reduce_dtype)
        return net

    def _whole(self, model: nn.Module) -> list[nn.Parameter] | None:
        """The parameters that are not shared out; None: all are, and travel in one precision.

        After a model that cannot be rounded none is: one of them may be its average, which is to have the same parts,
        though its layers be plain where those that are trained multiply in 8 bits.
        """
        if self.gather_precision != "auto" or self.runtime.precision != "bf16":
            return None
        whole = stay_whole(model)
        rounds = whole is not None and self._rounds is not False
        if rounds != self._rounds:
            what = "weights are gathered in bf16" if rounds else "parameters are gathered in fp32"
            log.info("parallel.gather=auto: %s", what)
        self._rounds = rounds
        return whole if rounds else None

    @contextlib.contextmanager
    def accumulating(self, net: FSDPModule, last: bool) -> Iterator[None]:
        net.set_requires_gradient_sync(last)
        net.whole_gradients.last = last
        yield

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer = getattr(optimizer, "_base_optimizer", optimizer)  # of Lookahead: it has the state
        if type(optimizer) in ELEMENTWISE:
            step_on_parts(optimizer)
        else:
            step_on_dtensors(optimizer, self.mesh)

    def clip_gradients(
        self, parameters: Iterable[nn.Parameter], limit: float | None, optimizer: torch.optim.Optimizer | None = None
    ) -> Tensor:
        parameters = list(parameters)
        with parts_of(parameters) as parts:
            # What every process has whole is one's to count.
            own = [isinstance(parameter, DTensor) or self.is_main for parameter in parameters]
            gradients = [part.grad for part in itertools.compress(parts, own) if part.grad is not None]
            squared = nn.utils.get_total_norm(gradients).square().to(self.device)  # of none it is on the CPU
            dist.all_reduce(squared)
            norm = squared.sqrt()
            if limit:
                nn.utils.clip_grads_with_norm_(parts, limit, norm)
        return norm

    @torch.no_grad()
    def update_ema(self, ema: nn.Module, model: nn.Module, step: int) -> None:
        """On parts, as steps are, because ema.update takes no mix of parts and whole tensors."""
        averages, values = ([part_of(t) for t in m.state_dict().values()] for m in (ema.module, model))
        floating = [average.is_floating_point() for average in averages]
        averaged = [list(itertools.compress(tensors, floating)) for tensors in (averages, values)]
        torch._foreach_lerp_(*averaged, weight=1.0 - ema.get_decay(step))
        for average, value, is_averaged in zip(averages, values, floating, strict=True):
            if not is_averaged:
                average.copy_(value)

    def full(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def dist_environment() -> tuple[int, int]:
    """(rank, world) as torchrun sets them."""
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        raise UsageError(
            "parallel=ddp and parallel=fsdp train on several processes, which torchrun starts: "
            "torchrun --nproc-per-node=NUMBER train.py parallel=ddp ..."
        ) from error
