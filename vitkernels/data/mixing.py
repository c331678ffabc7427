"""Mixup and CutMix of a finished batch, drawn from (seed, epoch, batch) alone.

Mixing runs in the process that makes the batch, never on the accelerator, where each new CutMix box would be a new
graph for a lazy or compiling runtime.

Shapes: B batch, C channels, S image side, K classes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vitkernels.data.checks import check_number, is_numbers, value_error
from vitkernels.data.randomness import Stream, seeded_globals
from vitkernels.errors import UsageError, unknown_name

MODES = ("batch", "pair", "elem")
SETTINGS = ("mixup_alpha", "cutmix_alpha", "cutmix_minmax", "prob", "switch_prob", "mode", "off_epoch")


class Mixing:
    """Mixup and CutMix by timm: "mixup: Beyond Empirical Risk Minimization" (arXiv:1710.09412), arXiv:1905.04899.

    Row i is mixed with row B-1-i. Label smoothing is left to the loss.

    mixup_alpha, cutmix_alpha: parameters of the Beta distributions of the mixing ratio; 0 disables one.
    cutmix_minmax: (least, greatest) side of the box as a share of the image's; replaces cutmix_alpha.
    prob: share of batches (or rows) that are mixed. switch_prob: share of those that get CutMix if both are enabled.
    mode: one mixture per "batch", per "pair" of rows, or per row ("elem").
    off_epoch: stop mixing from this epoch on; targets stay soft, so shapes do not change. None never stops.
    Raises UsageError for invalid settings.
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
        from timm.data import Mixup  # timm takes seconds to import; runs without mixing skip it

        if mode not in MODES:
            raise unknown_name("mixup mode", str(mode), MODES)
        check_number("mixup.mixup_alpha", mixup_alpha)
        check_number("mixup.cutmix_alpha", cutmix_alpha)
        check_number("mixup.prob", prob, 0, 1)
        check_number("mixup.switch_prob", switch_prob, 0, 1)
        check_number("mixup.off_epoch", off_epoch, integer=True, null=True)
        if cutmix_minmax is None and not (mixup_alpha > 0 or cutmix_alpha > 0):
            raise UsageError(
                f"mixup_alpha={mixup_alpha} and cutmix_alpha={cutmix_alpha} without cutmix_minmax mix nothing: set one "
                "of them above 0, or disable mixing with mixup=None",
                code="data.mixup",
                mixup_alpha=mixup_alpha,
                cutmix_alpha=cutmix_alpha,
            )
        if cutmix_minmax is not None and not (
            is_numbers(cutmix_minmax, 2) and 0 <= cutmix_minmax[0] < cutmix_minmax[1] <= 1
        ):
            raise value_error("mixup.cutmix_minmax", cutmix_minmax, "two shares like [0.2, 0.8]")
        self.seed = seed
        self.one_per_batch = mode == "batch"
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
        """Mix images (B, C, S, S) with targets int64 (B,), negative without a sample; return soft targets (B, K).

        A row without a sample keeps an image and a soft target of zeros, and its partner stays unmixed.
        """
        missing = targets < 0
        if missing.any():
            # The partner temporarily fills the missing row, so it is mixed with itself.
            images = torch.where(missing[:, None, None, None], images.flip(0), images)
            targets = torch.where(missing, targets.flip(0), targets).clamp(min=0)  # clamp: both may be missing
        self.mixup.mixup_enabled = self.off_epoch is None or epoch < self.off_epoch
        with seeded_globals(self.seed, Stream.MIX, epoch, batch):
            images, soft_targets = self.mixup(images, targets)
        images[missing] = 0
        soft_targets[missing] = 0
        return images, soft_targets


def build_mixing(settings: Mapping[str, Any] | None, *, num_classes: int, seed: int, batch_size: int) -> Mixing | None:
    """Return a Mixing with these settings; None for None. UsageError for unknown settings and odd batch sizes."""
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise value_error("mixup", settings, "None, or settings such as {mixup_alpha: 0.8}")
    for name in settings:
        if name not in SETTINGS:
            raise unknown_name("mixup setting", str(name), SETTINGS)
    if batch_size % 2:
        raise UsageError(
            f"batch_size={batch_size} is odd, but mixup pairs rows of a batch: use an even batch size or mixup=None",
            code="data.mixup",
            batch_size=batch_size,
        )
    return Mixing(num_classes, seed, **settings)
