"""Keep the weights of a run's best evaluation next to its results: best.safetensors, and best_ema.safetensors."""

import logging
import os
from pathlib import Path

from torch import Tensor

from vitkernels.checkpoint.checkpoints import CheckpointError, Checkpoints, folder_name, load_state, load_tensors
from vitkernels.checkpoint.export import export_safetensors, read_notes
from vitkernels.files import write_atomically

log = logging.getLogger("vitkernels")

Weights = dict[str, dict[str, Tensor]]  # state dicts by the name of their file


def is_better(found: dict, best: dict) -> bool:
    """Return whether an evaluation beats the best one: a higher top-1 accuracy, or the same at a lower loss.

    With several labels for an image, the mean average precision takes the place of the accuracy.
    """
    figure = "map" if "map" in found else "top1"
    if found[figure] != best.get(figure, -1.0):
        return found[figure] > best.get(figure, -1.0)
    return best.get("loss") is not None and found["loss"] < best["loss"]  # older checkpoints keep no loss


class BestWeights:
    """The exported weights of a run's best evaluation; only the main process calls these methods.

    Args:
        folder: the run's folder.
        checkpoints: the run's checkpoints; `checkpoints/best` follows.
        notes: class names and preprocessing, kept in each file with the figures of the evaluation as "best".
    """

    def __init__(self, folder: Path, checkpoints: Checkpoints, notes: dict):
        self.folder, self.checkpoints, self.notes = folder, checkpoints, notes

    def path(self, has_ema: bool) -> Path:
        """Return the file whose accuracy decides: that of the EMA if there is one."""
        return self.folder / ("best_ema.safetensors" if has_ema else "best.safetensors")

    def keep(self, weights: Weights, best: dict, saved: Path | None) -> bool:
        """Replace the files by these weights, and make `checkpoints/best` point to their checkpoint.

        Args:
            weights: state dicts under "best" and, with an EMA, "best_ema".
            best: the figures of their evaluation.
            saved: the checkpoint of the same step, None if there is none.

        Return False, with the earlier best kept, if the checkpoint or the files could not be written.
        """
        if saved is not None:
            self.checkpoints.wait()
            if not saved.is_dir():
                return False
        try:
            self._write(weights, best)
        except OSError as error:
            log.error("could not write the best weights of step %d: %s; training continues", best["step"], error)
            return False
        return saved is None or self.checkpoints.mark_best(saved)

    def restore(self, checkpoint: Path, best: dict, names: list[str]) -> bool:
        """Make the files hold the best weights of a run that resumes from `checkpoint`.

        An attempt that was killed may have left the weights of a later step. They are then read from the run that
        `checkpoint` belongs to, or from the best step's checkpoint. Return False if neither has them: the files are
        removed, because their weights would not match the summary.
        """
        run = checkpoint.resolve().parent.parent
        for folder in (self.folder, run):
            if all(read_notes(folder / f"{name}.safetensors", ["best"]).get("best") == best for name in names):
                for name in names if folder.resolve() != self.folder.resolve() else ():
                    _copy(folder / f"{name}.safetensors", self.folder / f"{name}.safetensors")
                return True
        kept = run / "checkpoints" / folder_name(best["step"])
        try:
            load_state(kept)
        except CheckpointError:
            self.remove()
            return best["step"] == 0
        self._write({name: load_tensors(kept, "ema" if name == "best_ema" else "model") for name in names}, best)
        return True

    def remove(self) -> None:
        """Remove the files, such as those of an attempt that left no checkpoint."""
        for has_ema in (False, True):
            self.path(has_ema).unlink(missing_ok=True)

    def _write(self, weights: Weights, best: dict) -> None:
        """Write all files before replacing any, so that a full disk leaves a matching pair."""
        staged = [(self.folder / f".{name}.new", self.folder / f"{name}.safetensors") for name in weights]
        try:
            for (new, _), state_dict in zip(staged, weights.values(), strict=True):
                export_safetensors(state_dict, new, {**self.notes, "best": best})
            for new, path in staged:
                os.replace(new, path)
        finally:
            for new, _ in staged:
                new.unlink(missing_ok=True)


def _copy(source: Path, path: Path) -> None:
    content = source.read_bytes()
    write_atomically(path, lambda file: file.write(content))
