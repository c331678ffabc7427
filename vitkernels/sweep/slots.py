"""How many jobs of a sweep run at once on one machine, which GPU each of them gets, and the caches they share.

Launchers that start every job at once (submitit's local one) or know nothing of GPUs are held back here, where a job
starts its own process: a slot is a locked file, which the kernel gives free however its job ends.
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

# The GPUs that the sweep was started with; submitit's local launcher hides them from the jobs.
_GPUS_OF_THE_SWEEP = "VITKERNELS_SWEEP_GPUS"
# Where each compiler looks for its cache.
_CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "JAX_COMPILATION_CACHE_DIR": "jax",
}


def check(slots: int | str | None) -> None:
    """Raise UsageError when `slots` is no value of sweep.slots."""
    fits = slots is None or slots in ("auto", "gpus") or (type(slots) is int and slots >= 1)
    if not fits:
        raise UsageError(f"sweep.slots must be auto, gpus, a whole number of at least 1, or null; got {slots!r}")


def remember_gpus() -> None:
    """Note, for the jobs started from here, which GPUs are visible now. Called before the launcher changes that."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        import torch

        visible = ",".join(str(i) for i in range(torch.cuda.device_count()))
    os.environ[_GPUS_OF_THE_SWEEP] = visible


@contextlib.contextmanager
def slot(slots: int | str | None) -> Iterator[dict[str, str]]:
    """Wait until a job may start; gives the environment variables that decide over its GPUs.

    slots: "gpus": one job per GPU, which it has for itself (one job at a time where there is none); a number: that many
    jobs at once; None: no limit; "auto": "gpus" with submitit's local launcher, else None. Counted over all sweeps of
    this user on this machine.
    """
    visible = os.environ.get(_GPUS_OF_THE_SWEEP, "")
    all_at_once = os.environ.get("SUBMITIT_EXECUTOR") == "local"
    given_back = {"CUDA_VISIBLE_DEVICES": visible} if all_at_once else {}
    if slots == "auto":
        slots = "gpus" if all_at_once else None
    if slots is None:
        yield given_back
        return
    gpus = [gpu for gpu in visible.split(",") if gpu] if slots == "gpus" else []
    names = [f"gpu{gpu}" for gpu in gpus] or [f"slot{i}" for i in range(1 if slots == "gpus" else slots)]
    with _locked(names) as name:
        yield given_back | ({"CUDA_VISIBLE_DEVICES": name.removeprefix("gpu")} if gpus else {})


@contextlib.contextmanager
def _locked(names: list[str]) -> Iterator[str]:
    """The first of the names that is free, for as long as the context lasts."""
    folder = Path(tempfile.gettempdir()) / f"vitkernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.ExitStack() as files:
        opened = {name: files.enter_context(open(folder / f"{name}.lock", "w")) for name in names}
        free = next(filter(lambda name: _try_to_lock(opened[name]), names), None)
        if free is None:
            log.info("waiting for one of %s", ", ".join(names))
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
    """Environment variables that make compilers keep what they compiled in `folder`; those that are set win."""
    if folder is None:
        return {}
    try:
        home = Path(folder).expanduser().absolute()
    except RuntimeError:  # a user without a home, such as a number that a container was started with
        log.warning("sweep.compile_cache=%s: this user has no home folder; each job compiles for itself", folder)
        return {}
    return {name: str(home / kind) for name, kind in _CACHES.items() if name not in os.environ}
