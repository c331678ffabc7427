"""A trace of a few training steps, by torch.profiler."""

import logging
from pathlib import Path

import torch

log = logging.getLogger("vitkernels")

PROFILED_STEPS = 8  # two to start the profiler, five in the trace, one during which it is written


def start_profiler(run_dir: Path, warmup_steps: int, steps_left: int):
    """Traces five steps after the warm-up, which are not timed, into the run's folder, for TensorBoard and Perfetto.

    None, and a line in the log, where fewer steps are left than that takes.
    """
    needed = warmup_steps + PROFILED_STEPS
    if steps_left < needed:
        log.warning(
            "trainer.profile: no trace, it takes %d steps with trainer.warmup_steps, not %d", needed, steps_left
        )
        return None
    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=warmup_steps, warmup=2, active=PROFILED_STEPS - 3, repeat=1),
        acc_events=True,  # of one cycle; without it torch 2.11 warns that it would forget earlier ones
        on_trace_ready=torch.profiler.tensorboard_trace_handler(str(run_dir / "profile")),
    )
    profiler.start()
    return profiler
