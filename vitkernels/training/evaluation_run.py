"""mode=eval: evaluate trained weights, and the same weights quantized, and write eval.json."""

import logging
from pathlib import Path

import torch
from timm.utils import random_seed

from vitkernels.config import Config
from vitkernels.data import Data
from vitkernels.errors import UsageError
from vitkernels.files import write_json
from vitkernels.parallel import Parallel
from vitkernels.provenance import git_commit
from vitkernels.quant import size_in_bytes
from vitkernels.training import features, setup
from vitkernels.training.answers import Answers, BatchAnswers, collect, expected_calibration_error
from vitkernels.training.evaluate import evaluate
from vitkernels.training.evaluation_files import log_findings, write_findings
from vitkernels.training.run_dir import identity
from vitkernels.training.summary import log_evaluation

log = logging.getLogger("vitkernels")


def evaluate_checkpoint(cfg: Config, parallel: Parallel, folder: Path) -> dict:
    """Evaluate the weights of `checkpoint` and return the content of eval.json.

    With quantization, the figures describe the quantized model; those of the original model end in _before.
    """
    random_seed(cfg.seed)
    setup.log_runtime(cfg, parallel)
    trained_on = setup.read_source(cfg, parallel)
    data = setup.build_data(cfg, parallel, trained_on)
    parts = setup.build_model(cfg, parallel, data, trained_on)
    answers: Answers | None = None
    if cfg.evaluation.name == "head":
        result, answers = _by_head(parts, data, parallel)
    elif data.targets == "classes":
        result, answers = _by_features(cfg, parts, data, parallel)
    else:
        raise UsageError(
            f"evaluation={cfg.evaluation.name} needs one class per image, but the data has {data.targets}: use "
            "evaluation=head",
            code="config.conflict",
            setting="evaluation.name",
            value=cfg.evaluation.name,
        )
    if answers is not None:
        result["ece"] = expected_calibration_error(answers)
    report = {
        "checkpoint": cfg.checkpoint,
        "model": cfg.model.name,
        "attn": parts.attn,
        "quant": cfg.quant.name,
        "evaluation": cfg.evaluation.name,
        "git_commit": git_commit(),
        "settings": identity(cfg.to_dict()),
        "preprocessing": data.preprocessing,
        **result,
    }
    parallel.on_main(write_json, folder / "eval.json", report)
    log_evaluation(result, data.num_classes)
    if answers is not None:
        parallel.on_main(log_findings, answers, data)
        parallel.on_main(write_findings, answers, data, folder)
        log.info("per-class figures and pictures are in %s", folder)
    return report


def _by_head(parts: setup.ModelParts, data: Data, parallel: Parallel) -> tuple[dict, Answers | None]:
    """Evaluate the classifier head, of the original weights and of the quantized ones; no answers if images have
    several labels.
    """
    parallel.runtime.synchronize()  # keep pending quantization work out of the timing
    batches: list[BatchAnswers] = []
    result = evaluate(parts.net, data.val, parallel, answers=batches) | {"bytes": size_in_bytes(parts.model)}
    if parts.quantized is not None and parts.quantized_net is not None:
        before = {f"{name}_before": result[name] for name in ("top1", "images_per_s", "bytes")}
        batches = []
        result = evaluate(parts.quantized_net, data.val, parallel, "quantized eval", batches) | before
        result["bytes"] = size_in_bytes(parts.quantized)
    return result, None if data.targets == "labels" else collect(batches, data.val, parallel)


def _by_features(cfg: Config, parts: setup.ModelParts, data: Data, parallel: Parallel) -> tuple[dict, Answers]:
    """Evaluate a classifier of the frozen features of the training set: nearest neighbors or a linear probe."""
    device = torch.device("cpu") if cfg.runtime.name == "xla" else parallel.runtime.device
    train = features.training_features(parts.model, data, parallel).to(device)
    val = features.extract(parts.model, data.val, parallel).to(device)
    figures: dict[str, float] = {"train_images": len(train.targets), "features": train.values.shape[1]}
    if cfg.evaluation.name == "knn":
        neighbors, temperature = cfg.evaluation.neighbors, cfg.evaluation.temperature
        probabilities = features.knn_scores(train, val.values, data.num_classes, neighbors, temperature)
        figures |= {"neighbors": neighbors, "temperature": temperature}
    else:
        probe = features.fit_linear_probe(train, data.num_classes)
        probabilities = probe.logits(val.values).softmax(1)
        figures["penalty"] = probe.penalty
    log.info("%s on %s", cfg.evaluation.name, ", ".join(f"{name} {value:g}" for name, value in figures.items()))
    result = features.accuracy(probabilities, val) | {"images_per_s": None} | figures
    confidence, predicted = probabilities.max(1)
    rows = zip(*(x.split(data.val.batch_size) for x in (val.targets, predicted, confidence)), strict=True)
    return result, collect(list(rows), data.val, parallel)
