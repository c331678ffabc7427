"""Trace a few training steps with torch.profiler."""

import logging
from pathlib import Path

import torch

log = logging.getLogger(__name__)

PROFILED_STEPS = 8  # two to start the profiler, five in the trace, one during which it is written


def start_profiler(folder: Path, warmup_steps: int, steps_left: int) -> torch.profiler.profile | None:
    """Start a profiler that traces five steps after the warm-up into `folder`/profile, for TensorBoard and Perfetto.

    Traced steps are not timed. Return None, with a warning, if the run has too few steps left.
    """
    needed = warmup_steps + PROFILED_STEPS
    if steps_left < needed:
        log.warning("no trace: trainer.profile needs %d steps after warm-up, %d are left", needed, steps_left)
        return None
    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=warmup_steps, warmup=2, active=PROFILED_STEPS - 3, repeat=1),
        acc_events=True,  # of one cycle; without it torch 2.11 warns that earlier cycles are dropped
        on_trace_ready=torch.profiler.tensorboard_trace_handler(str(folder / "profile")),
    )
    profiler.start()
    return profiler
