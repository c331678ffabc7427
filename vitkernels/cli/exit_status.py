"""End a run's process with one line and an exit status instead of a traceback."""

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from vitkernels.attention import AttentionBackend
from vitkernels.cli.wording import in_settings
from vitkernels.data import BadImagesError, SourceError, WorkerDiedError
from vitkernels.errors import UsageError
from vitkernels.files import is_disk_error
from vitkernels.training.disk_space import LostCheckpointsError
from vitkernels.training.health import NonFiniteLossError
from vitkernels.training.out_of_memory import OutOfMemoryError

log = logging.getLogger("vitkernels")

# Errors whose message is enough without a traceback.
_EXPLAINED = (
    NonFiniteLossError, BadImagesError, SourceError, WorkerDiedError, OutOfMemoryError, LostCheckpointsError,
)  # fmt: skip


@contextmanager
def errors_as_exit_status() -> Iterator[None]:
    """Log an error of a run, and exit: with 2 if the user must fix a setting or free disk space, else with 1."""
    try:
        yield
    except UsageError as error:
        log.error("error: %s", in_settings(error))
        sys.exit(2)
    except _EXPLAINED as error:
        log.error("error: %s", error)
        sys.exit(1)
    except Exception as error:
        if is_disk_error(error):
            log.error("error: %s: free some space, or write the run elsewhere with hydra.run.dir=FOLDER", error)
            sys.exit(2)
        log.exception(_failed_part(error))
        sys.exit(1)


def _failed_part(error: Exception) -> str:
    """Return whose code raised the error: the attention backend of another package, or this package."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        backend = frame.f_locals.get("self")
        if isinstance(backend, AttentionBackend) and backend.is_foreign:
            return f"attention backend {backend.name!r} of {type(backend).__module__} failed"
    return "internal error (please report it)"
