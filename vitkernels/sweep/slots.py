"""Limit how many jobs of a sweep run at once on one machine, assign each a GPU, and share compiler caches.

Some launchers start every job at once (submitit's local one) or do not assign GPUs. The limit is therefore enforced
here, just before a job starts its process. A slot is a locked file: the kernel releases it however the job ends.
"""

import contextlib
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from vitkernels.errors import UsageError

log = logging.getLogger(__name__)

# The GPUs visible to the sweep's own process; submitit's local launcher hides them from the jobs.
_SWEEP_GPUS = "VITKERNELS_SWEEP_GPUS"
# The environment variable of each compiler's cache folder, and its subfolder in the shared cache.
_CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "JAX_COMPILATION_CACHE_DIR": "jax",
}


def check(slots: int | str | None) -> None:
    """Raise UsageError unless `slots` is a valid value of sweep.slots."""
    valid = slots is None or slots in ("auto", "gpus") or (type(slots) is int and slots >= 1)
    if not valid:
        raise UsageError(
            f"sweep.slots must be auto, gpus, a positive integer or null; got {slots!r}",
            code="sweep.slots",
            slots=slots,
        )


def remember_gpus() -> None:
    """Record the visible GPUs for the jobs started from this process; call it before the launcher hides them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        import torch

        visible = ",".join(str(i) for i in range(torch.cuda.device_count()))
    os.environ[_SWEEP_GPUS] = visible


@contextlib.contextmanager
def slot(slots: int | str | None) -> Iterator[dict[str, str]]:
    """Wait for a free slot and hold it; yield the environment variables that select the job's GPUs.

    Args:
        slots: "gpus" gives each job one GPU to itself, or runs one job at a time on a machine without GPUs. A number
            runs that many jobs at once. None sets no limit. "auto" is "gpus" under submitit's local launcher and None
            elsewhere. The limit is shared by all sweeps of this user on this machine.
    """
    visible = os.environ.get(_SWEEP_GPUS, "")
    starts_all_jobs_at_once = os.environ.get("SUBMITIT_EXECUTOR") == "local"
    restored = {"CUDA_VISIBLE_DEVICES": visible} if starts_all_jobs_at_once else {}
    if slots == "auto":
        slots = "gpus" if starts_all_jobs_at_once else None
    if slots is None:
        yield restored
        return
    gpus = [gpu for gpu in visible.split(",") if gpu] if slots == "gpus" else []
    names = [f"gpu{gpu}" for gpu in gpus] or [f"slot{i}" for i in range(slots if isinstance(slots, int) else 1)]
    with _locked(names) as name:
        yield restored | ({"CUDA_VISIBLE_DEVICES": name.removeprefix("gpu")} if gpus else {})


@contextlib.contextmanager
def _locked(names: list[str]) -> Iterator[str]:
    """Lock the first free name for the duration of the context, waiting if all are taken."""
    folder = Path(tempfile.gettempdir()) / f"vitkernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.ExitStack() as files:
        opened = {name: files.enter_context(open(folder / f"{name}.lock", "w")) for name in names}
        free = next(filter(lambda name: _try_to_lock(opened[name]), names), None)
        if free is None:
            log.info("waiting for a free slot (%s)", ", ".join(names))
        while free is None:
            time.sleep(0.2)
            free = next(filter(lambda name: _try_to_lock(opened[name]), names), None)
        yield free


def _try_to_lock(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def shared_caches(folder: str | None) -> dict[str, str]:
    """Return environment variables that point compiler caches into `folder`; variables already set take precedence."""
    if folder is None:
        return {}
    try:
        root = Path(folder).expanduser().absolute()
    except RuntimeError:  # a user without a home folder, such as a bare user id in a container
        log.warning("sweep.compile_cache=%s: this user has no home folder; compiler caches are not shared", folder)
        return {}
    return {name: str(root / kind) for name, kind in _CACHES.items() if name not in os.environ}
