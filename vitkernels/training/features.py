"""Evaluate a backbone's frozen features, without its classifier head, by nearest neighbors and a linear probe.

Shapes: N training images, M evaluation images, D features, K classes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitkernels.data import IGNORE, Data, Loader
from vitkernels.data.device_transforms import finished
from vitkernels.errors import UsageError
from vitkernels.inference.run_model import pooled_features
from vitkernels.parallel import Parallel
from vitkernels.training.evaluate import no_images

_CHUNK = 2**28  # numbers in a temporary matrix: 1 GiB


@dataclass(frozen=True)
class Features:
    """The pooled features of a split, float32 (N, D), and its targets (N,), IGNORE for rows without a sample."""

    values: Tensor
    targets: Tensor

    @property
    def present(self) -> Tensor:
        return self.targets != IGNORE

    def without_padding(self) -> "Features":
        """Return the rows that hold a sample."""
        return Features(self.values[self.present], self.targets[self.present])

    def to(self, device: torch.device) -> "Features":
        """Return the same on a device."""
        return Features(self.values.to(device), self.targets.to(device))


@torch.no_grad()
def extract(model: nn.Module, loader: Loader, parallel: Parallel, split: str = "evaluation") -> Features:
    """Return the input of the model's classifier head for each row of the loader, on the CPU.

    The model runs in evaluation mode; its mode is restored. NoImagesError, which names `split`, if no row holds a
    sample.
    """
    runtime, was_training = parallel.runtime, model.training
    model.eval()
    rows: list[tuple[Tensor, Tensor]] = []
    for images, targets in finished(loader, parallel.feed(loader.epoch(0))):
        with runtime.autocast():
            pooled = pooled_features(model, images)
        rows.append((pooled.float().cpu(), targets.cpu()))
        runtime.end_step(images, targets, kind="features")
    model.train(was_training)
    if not any((targets != IGNORE).any() for _, targets in rows):
        raise no_images(split, loader, parallel)
    return Features(torch.cat([row[0] for row in rows]), torch.cat([row[1] for row in rows]))


def training_features(model: nn.Module, data: Data, parallel: Parallel) -> Features:
    """Return the features of the training set, prepared as evaluation images.

    Raises:
        UsageError: "evaluation.processes" for several processes, "evaluation.data" for a data set that cannot give its
            training images in order, "evaluation.no_images" if none can be read.
    """
    if parallel.devices > 1:
        raise UsageError(
            "features are compared in one process on one device: start without torchrun, or set parallel=none",
            code="evaluation.processes",
            devices=parallel.devices,
        )
    if data.open_plain_train is None:
        raise UsageError(
            "the data set has no open_plain_train, which returns its training images unaugmented and in order",
            code="evaluation.data",
        )
    return extract(model, data.open_plain_train(), parallel, "training").without_padding()


def accuracy(probabilities: Tensor, val: Features) -> dict:
    """Return {"top1", "top5" in percent, "images"} of probabilities (M, K), padding left out."""
    top5 = probabilities.topk(min(5, probabilities.shape[1]), dim=1).indices
    hits = (top5 == val.targets[:, None])[val.present]
    count = len(hits)
    return {"top1": 100 * int(hits[:, 0].sum()) / count, "top5": 100 * int(hits.sum()) / count, "images": count}


# ---- nearest neighbors ----


def knn_scores(train: Features, values: Tensor, num_classes: int, neighbors: int, temperature: float) -> Tensor:
    """Return each image's share of the votes of its nearest training images, float32 (M, K).

    The neighbors are those of the highest cosine similarity s; each votes for its class with weight
    exp(s / temperature). Wu et al. 2018, arXiv:1805.01978, section 3.4, with DINO's 20 neighbors and temperature 0.07
    (Caron et al. 2021, arXiv:2104.14294, appendix F).
    """
    known, count = F.normalize(train.values, dim=1), min(neighbors, len(train.targets))
    scores = []
    for chunk in F.normalize(values, dim=1).split(max(1, _CHUNK // len(known))):
        similarity, nearest = (chunk @ known.T).topk(count, dim=1)
        weights = (similarity / temperature).softmax(dim=1)  # exp, scaled to sum 1
        votes = torch.zeros(len(chunk), num_classes, device=chunk.device)
        scores.append(votes.scatter_add_(1, train.targets[nearest], weights))
    return torch.cat(scores)


# ---- the linear probe ----

PENALTIES = tuple(10.0**-exponent for exponent in range(1, 8))  # strongest first: each fit starts from the last one
_HELD_OUT = 10  # one image of this many selects the penalty
_ITERATIONS = 100  # of L-BFGS


@dataclass(frozen=True)
class LinearProbe:
    """A linear classifier of standardized features.

    weight: (K, D). bias: (K,). mean, scale: (D,), of the training features. penalty: the L2 penalty it was fitted with.
    """

    weight: Tensor
    bias: Tensor
    mean: Tensor
    scale: Tensor
    penalty: float

    def logits(self, values: Tensor) -> Tensor:
        """Return the logits (M, K) of features (M, D)."""
        return (values - self.mean) / self.scale @ self.weight.T + self.bias


def fit_linear_probe(train: Features, num_classes: int) -> LinearProbe:
    """Return the multinomial logistic regression that fits the training features best.

    It minimizes mean cross-entropy + penalty / 2 · ‖weight‖² by L-BFGS. A random tenth of the images selects the
    penalty among PENALTIES, by its loss; the fit is then repeated on all images. (Radford et al. 2021,
    arXiv:2103.00020, appendix A.3, selects in a similar way.)
    """
    mean, scale = train.values.mean(0), train.values.std(0).clamp(min=1e-6)
    values = (train.values - mean) / scale
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0)).to(values.device)
    held_out = order % _HELD_OUT == 0
    start = values.new_zeros(num_classes, values.shape[1] + 1)
    losses, weights = [], start
    for penalty in PENALTIES:
        weights = _fit(values[~held_out], train.targets[~held_out], weights, penalty)
        losses.append(float(_loss(weights, values[held_out], train.targets[held_out])))
    penalty = PENALTIES[losses.index(min(losses))]
    fitted = _fit(values, train.targets, start, penalty)
    return LinearProbe(fitted[:, :-1], fitted[:, -1], mean, scale, penalty)


def _loss(weights: Tensor, values: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(values @ weights[:, :-1].T + weights[:, -1], targets)


def _fit(values: Tensor, targets: Tensor, start: Tensor, penalty: float) -> Tensor:
    """Return (K, D + 1): weight and bias that minimize the penalized loss, from `start` on."""
    weights = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([weights], max_iter=_ITERATIONS, history_size=20, line_search_fn="strong_wolfe")
    chunks = list(zip(*(x.split(max(1, _CHUNK // len(start))) for x in (values, targets)), strict=True))

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = penalty / 2 * weights[:, :-1].square().sum()
        total.backward()
        for rows, classes in chunks:
            loss = _loss(weights, rows, classes) * (len(rows) / len(values))
            loss.backward()
            total = total.detach() + loss.detach()
        return total

    optimizer.step(closure)
    return weights.detach()
