"""Accuracy and loss over an entire data set, each sample counted once."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from vitkernels.data import Loader
from vitkernels.data.contract import PRESENT
from vitkernels.data.device_transforms import finished
from vitkernels.errors import UsageError
from vitkernels.parallel import Parallel
from vitkernels.training.answers import BatchAnswers
from vitkernels.training.average_precision import mean_average_precision


class NoImagesError(UsageError):
    """No image of a split can be evaluated; all processes raise it."""


def no_images(split: str, loader: Loader, parallel: Parallel) -> NoImagesError:
    """Return the error, after an epoch of a loader, that no row held an image. All processes must call this."""
    unreadable = int(parallel.total({"images": len(loader.bad_images)})["images"])
    example = "".join(f", such as {path} ({reason})" for path, reason in [*loader.bad_images.items()][:1])
    return NoImagesError(
        f"no image of the {split} set can be evaluated: {unreadable} of {loader.num_samples} could not be read"
        f"{example}. Repair or replace these files; `vitkernels data check ROOT` lists those of a folder or of shards",
        code="evaluation.no_images",
        split=split,
        unreadable=unreadable,
        num_samples=loader.num_samples,
    )


def _totals(read: dict[str, list[float]], loader: Loader, parallel: Parallel) -> dict[str, float]:
    """Return the sums over all batches and processes, and the images of all batches but the first as "timed"."""
    own = {name: sum(values) for name, values in read.items()}
    totals = parallel.total({**own, "timed": sum(read["images"][1:])})
    if not totals["images"]:
        raise no_images("evaluation", loader, parallel)
    return totals


def _judge(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return which rows are images (B), which of the five likeliest classes are right (B, 5), and the sum of losses."""
    top5 = logits.topk(min(5, logits.shape[-1]), dim=-1).indices
    if targets.dim() == 2:
        present = targets[:, 0] >= 0
        hits = present[:, None] & (targets.gather(1, top5) > PRESENT)
        each = F.binary_cross_entropy_with_logits(logits, targets.clamp(min=0), reduction="none").mean(1)
        return present, hits, (each * present).sum()
    loss = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    return targets >= 0, top5 == targets[:, None], loss


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Loader,
    parallel: Parallel,
    kind: str = "eval",
    answers: list[BatchAnswers] | None = None,
) -> dict:
    """Return {"top1", "top5" in percent, "loss", "images", "images_per_s"} of a model over the images of all ranks.

    With several labels for an image (targets float32), "top1" and "top5" count images whose most likely class, or one
    of the five most likely, is among its labels; "map" is the mean average precision, and the loss is binary
    cross-entropy.

    The model runs in evaluation mode; its mode is restored. Rows with a negative target are padding and are ignored.
    images_per_s is the model's throughput without input wait. It excludes the first batch, which may compile, and is
    None if there is only one. NoImagesError if no row holds an image.

    Args:
        kind: the name of these steps for the runtime. Each model needs its own, because each compiles separately.
        answers: gets the targets, predicted classes and confidences of each batch, on the device; see `collect`.
    """
    runtime, was_training = parallel.runtime, model.training
    model.eval()
    counts: dict[str, list[torch.Tensor]] = {"images": [], "top1": [], "top5": [], "loss": []}
    stamps: list[tuple[Any, Any]] = []
    rows: list[tuple[torch.Tensor, torch.Tensor]] = []  # of data with several labels
    for images, targets in finished(loader, parallel.feed(loader.epoch(0))):
        begin = runtime.stamp()
        with runtime.autocast():
            logits = model(images).float()
        if targets.dim() == 2:
            rows.append((logits.clone(), targets))  # a CUDA graph overwrites its output
        present, hits, loss = _judge(logits, targets)
        counts["images"].append(present.sum())
        counts["top1"].append(hits[:, :1].sum())
        counts["top5"].append(hits.any(1).sum())
        counts["loss"].append(loss)
        if answers is not None:
            confidence, predicted = logits.softmax(-1).max(-1)
            answers.append((targets, predicted, confidence))
        runtime.end_step(images, targets, kind=kind)
        if not runtime.per_step_clock or not stamps:
            runtime.synchronize()
        stamps.append((begin, runtime.stamp()))
    runtime.synchronize()
    seconds = sum(runtime.elapsed_ms(begin, end) for begin, end in stamps[1:]) / 1e3
    read = {name: runtime.read(values) for name, values in counts.items()}
    model.train(was_training)

    totals = _totals(read, loader, parallel)
    count = totals["images"]
    precision = {"map": mean_average_precision(rows, parallel)} if rows else {}
    return precision | {
        "top1": 100 * totals["top1"] / count,
        "top5": 100 * totals["top5"] / count,
        "loss": totals["loss"] / count,
        "images": int(count),
        "images_per_s": totals["timed"] / seconds if totals["timed"] else None,
    }
