"""mode=eval: evaluate trained weights, and the same weights quantized, and write eval.json."""

from pathlib import Path

from timm.utils import random_seed

from vitkernels.config import Config
from vitkernels.files import write_json
from vitkernels.parallel import Parallel
from vitkernels.provenance import git_commit
from vitkernels.quant import size_in_bytes
from vitkernels.training import setup
from vitkernels.training.answers import BatchAnswers, collect, expected_calibration_error
from vitkernels.training.evaluate import evaluate
from vitkernels.training.evaluation_files import write_findings
from vitkernels.training.run_dir import identity
from vitkernels.training.summary import log_evaluation


def evaluate_checkpoint(cfg: Config, parallel: Parallel, folder: Path) -> dict:
    """Evaluate the weights of `checkpoint` and return the content of eval.json.

    With quantization, the figures describe the quantized model; those of the original model end in _before.
    """
    random_seed(cfg.seed)
    setup.log_runtime(cfg, parallel)
    trained_on = setup.read_source(cfg, parallel)
    data = setup.build_data(cfg, parallel, trained_on)
    parts = setup.build_model(cfg, parallel, data, trained_on)
    parallel.runtime.synchronize()  # keep pending quantization work out of the timing
    batches: list[BatchAnswers] = []
    result = evaluate(parts.net, data.val, parallel, answers=batches) | {"bytes": size_in_bytes(parts.model)}
    if parts.quantized is not None and parts.quantized_net is not None:
        before = {f"{name}_before": result[name] for name in ("top1", "images_per_s", "bytes")}
        batches = []
        result = evaluate(parts.quantized_net, data.val, parallel, "quantized eval", batches) | before
        result["bytes"] = size_in_bytes(parts.quantized)
    answers = collect(batches, data.val, parallel)
    result["ece"] = expected_calibration_error(answers)
    report = {
        "checkpoint": cfg.checkpoint,
        "model": cfg.model.name,
        "attn": parts.attn,
        "quant": cfg.quant.name,
        "git_commit": git_commit(),
        "settings": identity(cfg.to_dict()),
        "preprocessing": data.preprocessing,
        **result,
    }
    parallel.on_main(write_json, folder / "eval.json", report)
    log_evaluation(result, data.num_classes)
    parallel.on_main(write_findings, answers, data, folder)
    return report
