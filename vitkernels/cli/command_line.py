"""Run train.py's main function with the command line of this process, and turn errors into exit statuses."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vitkernels import attention
from vitkernels.cli.overrides import prepare
from vitkernels.cli.printable import print_any_path
from vitkernels.cli.ranks import rank_arguments
from vitkernels.cli.wording import explained, in_settings
from vitkernels.config.help import help_text
from vitkernels.config.location import PROGRAM
from vitkernels.errors import EXIT_INTERRUPTED, UsageError
from vitkernels.sweep import job

__all__ = ["add_backends", "run"]


def run(main: Callable[[], None], config_dir: str) -> int:
    """Call a Hydra main function, or `job.run_job` if the command line has -m; return the exit status.

    The status is 2 after an error in the command line, and `EXIT_INTERRUPTED` after Ctrl-C.
    """
    print_any_path()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # raise errors here instead of printing them
    OmegaConf.register_new_resolver("vitkernels.help", help_text, replace=True)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for a data set or an optimizer in the user's own module
    add_backends(config_dir)
    try:
        sys.argv = rank_arguments(job.add_sweep_folder([sys.argv[0], *prepare(sys.argv[1:], config_dir)]))
    except UsageError as error:
        return _failed(error)
    if {"-sc", "--shell-completion"} & set(sys.argv) and not PROGRAM.startswith("python"):
        sys.argv[0] = PROGRAM.split()[0]  # Hydra completes the arguments of this program
    sweeps = bool({"-m", "--multirun"} & set(sys.argv))
    if sweeps:
        # Launchers pickle the function of a job, so it must be importable; a script's functions are not.
        main = hydra.main(version_base="1.3", config_path=config_dir, config_name="config")(job.run_job)
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        return _failed(explained(error, config_dir, sys.argv[1:]))
    except BrokenPipeError:  # the reader of --help, such as `head`, closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if job.write_pending_verdict(error):
            return 1
        if isinstance(error, OSError):  # from Hydra, which creates the folder; a run reports its own errors
            setting = "hydra.sweep.dir" if sweeps else "hydra.run.dir"
            return _failed(f"could not create the results folder: {error}; set another with {setting}=FOLDER")
        if isinstance(error, UsageError):
            return _failed(in_settings(error))
        raise
    except KeyboardInterrupt:
        again = "run the same command again to continue"
        hint = again if sweeps else "resume=auto continues from the newest checkpoint"
        print(f"interrupted; {hint}", flush=True)
        return EXIT_INTERRUPTED
    return 0


def add_backends(config_dir: str) -> None:
    """Make attn=NAME known to Hydra for each attention backend without a YAML file, such as another package's."""
    store = ConfigStore.instance()
    for name in attention.names():
        if not (Path(config_dir) / "attn" / f"{name}.yaml").exists():
            store.store(group="attn", name=name, node={"name": name}, provider="vitkernels")


def _failed(message: object) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2
