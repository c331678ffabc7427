"""Mixup and CutMix over a finished batch, drawn from (seed, epoch, batch) alone.

It runs where the batch is made (in the workers) and never on the accelerator, where each new CutMix box would be a new
graph for a lazy or compiling runtime.

Shapes: B batch, C channels, S image side, K classes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vitkernels.data.checks import check_number, is_numbers, shown
from vitkernels.data.randomness import Stream, seeded_globals
from vitkernels.errors import UsageError, unknown_name

MODES = ("batch", "pair", "elem")
SETTINGS = ("mixup_alpha", "cutmix_alpha", "cutmix_minmax", "prob", "switch_prob", "mode", "off_epoch")


class Mixing:
    """timm's Mixup: "mixup: Beyond Empirical Risk Minimization" (arXiv:1710.09412) and "CutMix" (arXiv:1905.04899).

    Row i is mixed with row B-1-i. No label smoothing: that is the loss's work.

    mixup_alpha, cutmix_alpha: parameters of the Beta distributions; 0 switches one off.
    cutmix_minmax: (least, greatest) share of the image's side for the box; then used in place of cutmix_alpha.
    prob: share of the batches (or rows) that are mixed; switch_prob: share of those that get CutMix if both are on.
    mode: one mixture per "batch", "pair" of rows or row ("elem").
    off_epoch: from this epoch on nothing is mixed, but targets stay soft, so shapes do not change; None: never off.
    """

    def __init__(
        self,
        num_classes: int,
        seed: int,
        *,
        mixup_alpha: float = 0.8,
        cutmix_alpha: float = 1.0,
        cutmix_minmax: Sequence[float] | None = None,
        prob: float = 1.0,
        switch_prob: float = 0.5,
        mode: str = "batch",
        off_epoch: int | None = None,
    ):
        from timm.data import Mixup  # timm takes seconds to import: not where nothing is mixed

        if mode not in MODES:
            raise unknown_name("data.mixup.mode", str(mode), MODES)
        check_number("mixup.mixup_alpha", mixup_alpha)
        check_number("mixup.cutmix_alpha", cutmix_alpha)
        check_number("mixup.prob", prob, 0, 1)
        check_number("mixup.switch_prob", switch_prob, 0, 1)
        check_number("mixup.off_epoch", off_epoch, whole=True, null=True)
        if cutmix_minmax is None and not (mixup_alpha > 0 or cutmix_alpha > 0):
            raise UsageError(
                f"data.mixup mixes nothing: mixup_alpha={mixup_alpha}, cutmix_alpha={cutmix_alpha}, no cutmix_minmax. "
                "Give one of them a value above 0, or switch mixing off with data.mixup=null."
            )
        if cutmix_minmax is not None and not (
            is_numbers(cutmix_minmax, 2) and 0 <= cutmix_minmax[0] < cutmix_minmax[1] <= 1
        ):
            raise UsageError(f"data.mixup.cutmix_minmax={shown(cutmix_minmax)}: expected two shares like [0.2, 0.8]")
        self.seed = seed
        self.whole_batch = mode == "batch"
        self.off_epoch = off_epoch
        self.mixup = Mixup(
            mixup_alpha=mixup_alpha,
            cutmix_alpha=cutmix_alpha,
            cutmix_minmax=cutmix_minmax,
            prob=prob,
            switch_prob=switch_prob,
            mode=mode,
            label_smoothing=0.0,
            num_classes=num_classes,
        )

    def __call__(
        self, images: torch.Tensor, targets: torch.Tensor, epoch: int, batch: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """images (B, C, S, S), targets int64 (B,), negative where a row is no sample -> images, soft targets (B, K).

        The soft target of a row that is no sample is all zeros, and its image too; its partner stays unmixed.
        """
        missing = targets < 0
        if missing.any():
            # The partner takes the missing row's place for the moment, and so is mixed with itself.
            images = torch.where(missing[:, None, None, None], images.flip(0), images)
            targets = torch.where(missing, targets.flip(0), targets).clamp(min=0)  # clamp: both of a pair are missing
        self.mixup.mixup_enabled = self.off_epoch is None or epoch < self.off_epoch
        with seeded_globals(self.seed, Stream.MIX, epoch, batch):
            images, soft_targets = self.mixup(images, targets)
        images[missing] = 0
        soft_targets[missing] = 0
        return images, soft_targets


def build_mixing(settings: Mapping[str, Any] | None, *, num_classes: int, seed: int, batch_size: int) -> Mixing | None:
    """The `data.mixup` mapping as a Mixing; None stays None. UsageError for unknown settings and odd batches."""
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise UsageError(f"data.mixup={settings}: expected null, or settings such as {{mixup_alpha: 0.8}}")
    for name in settings:
        if name not in SETTINGS:
            raise unknown_name("data.mixup setting", str(name), SETTINGS)
    if batch_size % 2:
        raise UsageError(
            f"data.batch_size={batch_size} is odd, but mixup pairs the rows of a batch: "
            "choose an even batch size or data.mixup=null"
        )
    return Mixing(num_classes, seed, **settings)
