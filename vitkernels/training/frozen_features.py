"""Evaluate a backbone by its frozen features: k nearest neighbours, or a linear classifier on top.

Nothing is trained but the linear classifier. Shapes: N images, D features, K classes.
"""

import logging
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitkernels.data import Data, Loader
from vitkernels.errors import UsageError
from vitkernels.inference.run_model import pooled_features
from vitkernels.parallel import Parallel

log = logging.getLogger("vitkernels")

NEIGHBOURS, TEMPERATURE = 20, 0.07  # of DINO: Caron et al., "Emerging Properties in Self-Supervised ViTs", ICCV 2021
CHUNK = 1024  # images that are compared with all training images at once
PROBE_ITERATIONS = 1000


def evaluate_features(method: str, model: nn.Module, data: Data, parallel: Parallel) -> dict:
    """Return {"top1", "top5" in percent, "images", "training_images", ...} of a frozen backbone.

    Args:
        method: "knn", the weighted vote of the 20 training images with the highest cosine similarity, or
            "linear_probe", a logistic regression on the standardized features of the training images.
        model: a timm model; its classifier head is not used.
        data: needs `training_images`.

    Raises:
        UsageError: "evaluation.devices" on several devices, "evaluation.training_images" if the data set does not give
            its training images without augmentation.
    """
    if parallel.devices > 1:
        message = f"evaluation={method} runs on one device, and this run has {parallel.devices}"
        raise UsageError(message, code="evaluation.devices", devices=parallel.devices)
    if data.training_images is None:
        raise UsageError(
            f"evaluation={method} needs the training images without augmentation, in order: Data.training_images, a "
            "function that returns their loader. data=digits and data=imagefolder have it",
            code="evaluation.training_images",
        )
    train, train_targets = features_of(model, data.training_images(), parallel)
    val, val_targets = features_of(model, data.val, parallel)
    log.info("features: %d training and %d evaluation images, %d each", len(train), len(val), train.shape[1])
    scores, settings = _METHODS[method](train, train_targets, val, data.num_classes)
    ranked = scores.topk(min(5, data.num_classes)).indices == val_targets[:, None]
    found = {"top1": 100 * float(ranked[:, :1].sum()) / len(val), "images": len(val), "training_images": len(train)}
    top5 = {"top5": 100 * float(ranked.sum()) / len(val)} if data.num_classes > 5 else {}
    return {**found, **top5, **settings}


@torch.no_grad()
def features_of(model: nn.Module, loader: Loader, parallel: Parallel) -> tuple[Tensor, Tensor]:
    """Return the pooled features float32 (N, D) and targets int64 (N,) of a loader's readable images, on the CPU."""
    runtime, rows = parallel.runtime, []
    model.eval()
    for images, targets in parallel.feed(loader.epoch(0)):
        with runtime.autocast():
            features = pooled_features(model, images)
        runtime.end_step(images, targets, kind="features")
        kept = (targets := targets.cpu()) >= 0
        rows.append((features.float().cpu()[kept], targets[kept]))
    return torch.cat([features for features, _ in rows]), torch.cat([targets for _, targets in rows])


def nearest_neighbours(
    train: Tensor, train_targets: Tensor, val: Tensor, num_classes: int, k: int = NEIGHBOURS
) -> Tensor:
    """Return scores (N, K): each of the k nearest training images votes exp(cosine similarity / temperature).

    Wu et al., "Unsupervised Feature Learning via Non-Parametric Instance Discrimination", CVPR 2018, section 3.4.
    """
    bank, k = F.normalize(train), min(k, len(train))

    def chunks() -> Iterator[Tensor]:
        for part in val.split(CHUNK):
            similarity, nearest = (F.normalize(part) @ bank.T).topk(k)
            votes = (similarity / TEMPERATURE).exp()
            yield torch.zeros(len(part), num_classes).scatter_add_(1, train_targets[nearest], votes)

    return torch.cat(list(chunks()))


def _knn(train: Tensor, train_targets: Tensor, val: Tensor, num_classes: int) -> tuple[Tensor, dict]:
    scores = nearest_neighbours(train, train_targets, val, num_classes)
    return scores, {"k": min(NEIGHBOURS, len(train)), "temperature": TEMPERATURE}


def _linear_probe(train: Tensor, train_targets: Tensor, val: Tensor, num_classes: int) -> tuple[Tensor, dict]:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=PROBE_ITERATIONS))
    probe.fit(train.numpy(), train_targets.numpy())
    scores = torch.full((len(val), num_classes), -torch.inf)  # a class without training images
    scores[:, torch.from_numpy(probe[-1].classes_)] = torch.from_numpy(probe.predict_log_proba(val.numpy())).float()
    return scores, {"iterations": int(probe[-1].n_iter_.max())}


_METHODS: dict[str, Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, dict]]] = {
    "knn": _knn,
    "linear_probe": _linear_probe,
}
