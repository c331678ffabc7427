"""Adapt the command line to the rank of this process: only the main process writes files."""

from vitkernels.errors import UsageError
from vitkernels.parallel import rank_and_world


def rank_arguments(argv: list[str]) -> list[str]:
    """Return the command line for this process: all but the main one write no files and log only warnings.

    Raises UsageError (cli.sweep_on_ranks) for a sweep, which starts processes of its own.
    """
    chosen = [word.partition("=")[2] for word in argv if word.startswith("runtime=")]
    rank, world = rank_and_world(*chosen[-1:] or ["auto"])
    if world > 1 and {"-m", "--multirun"} & set(argv):
        raise UsageError(
            "a sweep starts its own processes: run it without torchrun, and not on the hosts of a TPU slice",
            code="cli.sweep_on_ranks",
            world=world,
        )
    if rank == 0:
        return argv
    kept = [word for word in argv if not word.startswith("hydra.run.dir=")]
    lines = f"hydra.job_logging.formatters.plain.format='[rank {rank}] %(message)s'"
    quiet = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=other_rank", lines]
    end = next((n for n, word in enumerate(kept) if word.startswith("-")), len(kept))
    return [*kept[:end], *quiet, *kept[end:]]  # Hydra does not accept settings on both sides of an option
