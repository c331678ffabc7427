"""The processes that torchrun started, as it describes them in the environment."""

import os


def rank() -> int | None:
    """Return this process's rank; None if torchrun did not start it."""
    return int(os.environ["RANK"]) if "RANK" in os.environ else None


def world_size() -> int:
    """Return the number of processes on all hosts; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size(unknown: int = 1) -> int:
    """Return the number of processes on this host; `unknown` if the environment does not say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", unknown))
