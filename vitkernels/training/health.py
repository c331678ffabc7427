"""Detect training problems: non-finite losses, parameters without gradients, a slow rank, slow input, a slow host."""

import logging
import math
import socket
from collections.abc import Callable
from statistics import fmean, median

from torch import nn

from vitkernels.data import Loader
from vitkernels.parallel import Parallel
from vitkernels.training.metrics import StepRecord
from vitkernels.training.step_timer import Window

log = logging.getLogger(__name__)

STRAGGLER_FACTOR, STRAGGLER_MS = 2.0, 5.0  # a straggler exceeds the others' median by this factor and this many ms
MIN_STEPS = 8  # a window with fewer timed steps gives no warning
HOST_BOUND = 0.5  # a window is host-bound if more than this share of its steps launched late
INPUT_BOUND = 0.1  # a window is input-bound if more than this share of its time was a wait for input


class NonFiniteLossError(RuntimeError):
    """The loss or the gradient norm became NaN or infinite; `step` and `ranks` say where."""

    on_every_rank = True  # all processes compare the same figures

    def __init__(self, message: str, step: int, ranks: tuple[int, ...] = ()):
        super().__init__(message)
        self.step, self.ranks = step, ranks

    def __reduce__(self) -> tuple[type, tuple[str, int, tuple[int, ...]]]:
        return type(self), (str(self), self.step, self.ranks)


def check_finite(
    records: list[StepRecord],
    describe_samples: Callable[[int, int], str],
    describe_last_checkpoint: Callable[[], str],
    check_gradients: bool = True,
) -> None:
    """Raise NonFiniteLossError at the first record that is not finite.

    Args:
        records: the steps to check.
        describe_samples: called with the step and the rank.
        describe_last_checkpoint: says which checkpoint can be resumed from.
        check_gradients: whether gradient norms must be finite too. Loss scaling in fp16 overflows on purpose until it
            has found its scale.
    """
    for record in records:
        if math.isfinite(record.loss) and (math.isfinite(record.grad_norm) or not check_gradients):
            continue
        ranks = record.nonfinite_ranks
        where = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
        samples = describe_samples(record.step, ranks[0] if ranks else 0)
        raise NonFiniteLossError(
            f"loss is {record.loss:.6g}{where}, gradient norm {record.grad_norm:.4g} at step {record.step}: "
            f"lr {record.lr:.3e}, samples {samples}. {describe_last_checkpoint()} "
            "Lower optim.lr, lengthen schedule.warmup_epochs, or set trainer.clip_grad.",
            record.step,
            ranks,
        )


def parameters_without_gradient(model: nn.Module) -> list[str]:
    """Return the names of trainable parameters without a gradient after backward, and log a warning."""
    names = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if names:
        listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")
        log.warning(
            "%d parameters received no gradient and will not be updated: %s. Either the loss does not depend on them, "
            "or an attention backend or op has no backward pass",
            *(len(names), listed),
        )
    return names


def warn_of_straggler(parallel: Parallel, step: int, window: Window) -> None:
    """Warn if one process was much slower than the others in this window. All processes must call it.

    It compares the time from the start of a step to the end of its last forward pass, input included. Unlike the step
    time, this excludes the wait for other ranks under ddp. Under fsdp it includes that wait.
    """
    if parallel.world == 1:
        return
    if len(window.forward_done_ms) < MIN_STEPS:  # the same on all processes
        return
    own = fmean(window.forward_done_ms), fmean(window.input_wait_ms), socket.gethostname()
    everyone = parallel.gather(own)
    slowest = max(range(parallel.world), key=lambda rank: everyone[rank][0])
    ms, wait, host = everyone[slowest]
    others = median(one[0] for rank, one in enumerate(everyone) if rank != slowest)
    if parallel.is_main and ms > STRAGGLER_FACTOR * others and ms - others > STRAGGLER_MS:
        log.warning(
            "rank %d on %s slows the others down: in the steps up to %d, its forward pass ended %.1f ms after the "
            "start of the step (%.1f ms of this are input wait); median of the other ranks: %.1f ms",
            *(slowest, host, step, ms, wait, others),
        )


def warn_if_host_bound(step: int, window: Window, advise_graphs: bool = True) -> bool:
    """Warn if the GPU waited for kernel launches in most steps of this window; return whether it did.

    advise_graphs: whether CUDA graphs are off and can be recorded.
    """
    late = window.host_was_late
    if len(late) < MIN_STEPS or fmean(late) <= HOST_BOUND:
        return False
    log.warning(
        "host-bound: in %d of %d steps up to step %d the GPU waited for the host to launch kernels, so step times say "
        "little about kernels; use %sa larger data.batch_size",
        *(sum(late), len(late), step, "compile=auto (CUDA graphs) or " if advise_graphs else ""),
    )
    return True


def warn_if_input_bound(step: int, window: Window, loader: Loader | None) -> bool:
    """Warn if the device waited for input in a large part of this window; return whether it did.

    A loader with a method `advice()` says what would make it faster.
    """
    if len(window.forward_done_ms) < MIN_STEPS:  # also where single steps cannot be timed
        return False
    wait, total = fmean(window.input_wait_ms), fmean(window.step_ms)
    if wait <= INPUT_BOUND * total:
        return False
    advice = getattr(loader, "advice", None)
    log.warning(
        "input-bound: of %.1f ms per step up to step %d, the device waited %.1f ms for input%s",
        *(total, step, wait, f"; {advice()}" if advice else ""),
    )
    return True
