"""Who keeps the others waiting: one of several processes, or the host its GPU."""

import logging
import socket
from statistics import fmean, median

from vitkernels.parallel import Parallel
from vitkernels.training.step_timer import Window

log = logging.getLogger(__name__)

FACTOR, LEAST_MS = 2.0, 5.0  # times the others' median, and at least so many ms more, make a straggler
LEAST_STEPS = 8  # fewer are no habit
HOST_BOUND = 0.5  # of the steps


def name_straggler(parallel: Parallel, step: int, window: Window) -> None:
    """Warn of the slowest process of a window if it is much slower than the others. All processes must call it.

    Compared is the time from the beginning of a step to the end of its last forward pass, input included: with
    gradients averaged (ddp) it has no waiting for others in it, as the step as a whole has. (Under fsdp it does.)
    """
    if parallel.world == 1:
        return
    if len(window.forward_done_ms) < LEAST_STEPS:  # the same on all processes
        return
    own = fmean(window.forward_done_ms), fmean(window.input_wait_ms), socket.gethostname()
    everyone = parallel.gather(own)
    slowest = max(range(parallel.world), key=lambda rank: everyone[rank][0])
    ms, wait, host = everyone[slowest]
    others = median(one[0] for rank, one in enumerate(everyone) if rank != slowest)
    if parallel.is_main and ms > FACTOR * others and ms - others > LEAST_MS:
        log.warning(
            "rank %d on %s keeps the others waiting: up to step %d it took %.1f ms to the end of its forward pass, of "
            "which %.1f ms for its input, and the others %.1f ms (median)",
            *(slowest, host, step, ms, wait, others),
        )


def name_late_host(step: int, window: Window) -> bool:
    """Warn of a window in most of whose steps the device waited for the host to launch kernels; whether it did."""
    late = window.host_was_late
    if len(late) < LEAST_STEPS or fmean(late) <= HOST_BOUND:
        return False
    log.warning(
        "in %d of %d steps up to step %d the GPU waited for the host, which launches kernels more slowly than they "
        "run: step times are the host's, and say little of kernels. compile=reduce-overhead (CUDA graphs) or a larger "
        "data.batch_size mends that",
        *(sum(late), len(late), step),
    )
    return True
