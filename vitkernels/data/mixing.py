"""Draw Mixup and CutMix of a batch from (seed, epoch, batch) alone; device_transforms applies them.

Shapes: B batch, K classes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vitkernels.data.checks import check_number, is_numbers, value_error
from vitkernels.data.randomness import Stream, seeded_globals
from vitkernels.errors import UsageError, unknown_name

_NO_BOX = (0, 0, 0, 0)
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
                "of them above 0, or disable mixing with mixup=null",
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

    def draw(
        self, targets: torch.Tensor, image_size: int, epoch: int, batch: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return soft targets float32 (B, K) and the draws that vitkernels.data.device_transforms.mix applies.

        targets: int64 (B,), negative without a sample. Such a row gets a soft target of zeros, and its partner stays
        unmixed. Or float32 (B, K), negative without a sample, which such a row keeps.
        """
        from timm.data.mixup import mixup_target

        if targets.dim() == 2:
            return self._draw_dense(targets, image_size, epoch, batch)
        missing = targets < 0
        # The partner temporarily fills the missing row, so it is mixed with itself; clamp: both may be missing.
        targets = torch.where(missing, targets.flip(0), targets).clamp(min=0)
        self.mixup.mixup_enabled = self.off_epoch is None or epoch < self.off_epoch
        with seeded_globals(self.seed, Stream.MIX, epoch, batch):
            shares = self._shares_per_batch if self.one_per_batch else self._shares_per_row
            own, other, boxes, target_share = shares(len(targets), image_size)
        soft_targets = mixup_target(targets, self.mixup.num_classes, target_share)
        soft_targets[missing] = 0
        return soft_targets, {"own_share": own, "other_share": other, "cutmix": boxes, "missing": missing}

    def _draw_dense(
        self, targets: torch.Tensor, image_size: int, epoch: int, batch: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Do the same as `draw` for targets float32 (B, K)."""
        missing = targets[:, 0] < 0
        self.mixup.mixup_enabled = self.off_epoch is None or epoch < self.off_epoch
        with seeded_globals(self.seed, Stream.MIX, epoch, batch):
            shares = self._shares_per_batch if self.one_per_batch else self._shares_per_row
            own, other, boxes, share = shares(len(targets), image_size)
        partner = torch.where(missing.flip(0)[:, None], targets, targets.flip(0))
        mixed = torch.where(missing[:, None], targets, targets * share + partner * (1 - share))
        return mixed, {"own_share": own, "other_share": other, "cutmix": boxes, "missing": missing}

    def _shares_per_batch(self, rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        """Return own_share, other_share and boxes of each row, and the share of the targets: one mixture for all."""
        share, use_cutmix = self.mixup._params_per_batch()
        own, other, box, target_share = self._one_mixture(share, use_cutmix, size)
        return torch.full((rows,), own), torch.full((rows,), other), torch.tensor([box]).repeat(rows, 1), target_share

    def _shares_per_row(self, rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the same with a mixture per row, which the pair shares in mode "pair"."""
        pairs = self.mixup.mode == "pair"
        shares, use_cutmix = self.mixup._params_per_elem(rows // 2 if pairs else rows)
        drawn = [self._one_mixture(*one, size) for one in zip(shares, use_cutmix, strict=True)]
        drawn += drawn[::-1] if pairs else []
        own, other, boxes, target_shares = zip(*drawn, strict=True)
        return (
            torch.tensor(own, dtype=torch.float32),
            torch.tensor(other, dtype=torch.float32),
            torch.tensor(boxes),
            torch.tensor(target_shares, dtype=torch.float32)[:, None],
        )

    def _one_mixture(self, share: Any, use_cutmix: bool, size: int) -> tuple[Any, Any, tuple[int, ...], Any]:
        from timm.data.mixup import cutmix_bbox_and_lam

        if share == 1:
            return 1.0, 0.0, _NO_BOX, 1.0
        if not use_cutmix:
            return share, 1 - share, _NO_BOX, share
        box, share = cutmix_bbox_and_lam((size, size), share, self.mixup.cutmix_minmax, self.mixup.correct_lam)
        return 1.0, 0.0, tuple(int(edge) for edge in box), share


def build_mixing(settings: Mapping[str, Any] | None, *, num_classes: int, seed: int, batch_size: int) -> Mixing | None:
    """Return a Mixing with these settings; None for None. UsageError for unknown settings and odd batch sizes."""
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise value_error("mixup", settings, "null, or a mapping such as {mixup_alpha: 0.8, cutmix_alpha: 1.0}")
    for name in settings:
        if name not in SETTINGS:
            raise unknown_name("mixup setting", str(name), SETTINGS)
    if batch_size % 2:
        raise UsageError(
            f"batch_size={batch_size} is odd, but mixup pairs rows of a batch: use an even batch size or mixup=null",
            code="data.mixup",
            batch_size=batch_size,
        )
    return Mixing(num_classes, seed, **settings)
