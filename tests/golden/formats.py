"""The names, keys, types and tensors in the files of a run equal those recorded in formats.json.

What is recorded must stay. What is new must be listed in ADDED, so that each change of a format is on purpose.
"""

import json

from layout import of_run, of_sweep
from record import FORMATS

RECORDED = json.loads(FORMATS.read_text())

EXPORT = ("README.md", "config.json", "model.safetensors")
JOBS = ("attn=native/", "attn=sdpa/")
WEIGHTS = ("model", "model_ema", "best", "best_ema")
_DIGITS = {"input_size": [1, 16, 16], "mean": [0.305], "std": [0.376], "interpolation": "bicubic", "crop_pct": 1.0}
_DIGITS |= {"crop_mode": "center"}
FILE_PREPROCESSING = {
    "file_preprocessing.json": _DIGITS,
    "state.json": {
        "file_preprocessing.input_size[]": "int",
        "file_preprocessing.mean[]": "float",
        "file_preprocessing.std[]": "float",
        "file_preprocessing.interpolation": "str",
        "file_preprocessing.crop_pct": "float",
        "file_preprocessing.crop_mode": "str",
    },
}

FINDINGS = ("confusion.csv", "confusion.png", "mistakes.png", "per_class.csv", "predictions.png")

# "section: key" -> type or value, as layout.py has it, such as "summary.json: watts": "float".
ADDED: dict[str, object] = {
    "files: command.json": "file",  # the command that started the run
    "files: attn=native/command.json": "file",
    "files: attn=sdpa/command.json": "file",
    "command.json: command": "any",
    "summary.json: interpreted": "list",
    "summary.json: interpreted[]": "str",
    "summary.json: machine": "any",
    "summary.json: first_step_s": "float",
    # What a step's time was spent on, in addition to waiting for input.
    **{f"summary.json: {part}": "float" for part in ("host_late_ms", "device_busy_ms", "rest_ms")},
    **{f"TensorBoard: time/{part}": "scalar" for part in ("host_late_ms", "device_busy_ms", "rest_ms")},
    **{f"comparison.json: [].{part}": "float" for part in ("host_late_ms", "device_busy_ms", "rest_ms")},
    **{f"TensorBoard: curves/{name}": "scalar" for name in ("1_loss", "2_top1", "3_lr", "4_step_ms")},
    **{
        f"TensorBoard: _hparams_/{part}: {name}": "parameter"
        for part in ("experiment", "session_start_info")
        for name in ("seed", "epochs", "weight_decay")
    },
    # A sweep without rounds: sweep.rounds=null.
    "files: rounds.json": "file",
    "comparison.json: [].runtime": "str",
    "comparison.json: [].machine": "any",
    "comparison.json: [].finished": "str",
    "comparison.json: [].interpreted": "list",
    **{f"comparison.json: [].{key}": "NoneType" for key in ("measured_by", "judgement", "open_because", "rounds")},
    "state.json: checksum": "int",  # of everything else in it
    "state.json: model_arguments": "dict",  # they identify the run, in addition to the model's name
    **{f"state.json: model_arguments.{name}": "int" for name in ("embed_dim", "num_heads", "depth", "in_chans")},
    "config.json: data.decode": "pillow",
    "config.json: data.cuda_share": 1.0,
    "config.json: speed": "auto",
    "config.json: trainer.loss": "auto",
    "config.json: trainer.bce_threshold": None,
    **{f"{place}.trainer.loss": "str" for place in ("eval.json: settings", "job.json: [].circumstances")},
    **{f"{place}.trainer.bce_threshold": "NoneType" for place in ("eval.json: settings", "job.json: [].circumstances")},
    "eval.json: settings.speed": "str",
    "eval.json: ece": "float",
    "eval.json: evaluation": "str",
    "job.json: [].circumstances.evaluation.name": "str",
    "job.json: [].circumstances.evaluation.neighbors": "int",
    "job.json: [].circumstances.evaluation.temperature": "float",
    **{f"files: {job}{name}": "file" for job in ("", *JOBS) for name in FINDINGS},
    **{f"TensorBoard: evaluation/{name}": "image" for name in ("confusion", "mistakes", "predictions")},
    **{f"job.json: [].circumstances.distill.{name}": "NoneType" for name in ("teacher", "checkpoint")},
    "job.json: [].circumstances.distill.kind": "str",
    "job.json: [].circumstances.speed": "str",
    **{f"job.json: [].circumstances.distill.{name}": "float" for name in ("weight", "temperature")},
    **{f"job.json: [].circumstances.logger.{name}": "str" for name in ("name", "project")},
    "files: best.safetensors": "file",
    "files: best_ema.safetensors": "file",
    "model.safetensors: metadata.format": "str",
    "model_ema.safetensors: metadata.format": "str",
    "state.json: best.loss": "float",
    "state.json: best.epoch": "float",
    "summary.json: best.loss": "float",
    "summary.json: best.epoch": "float",
    "summary.json: best.weights": "str",
    "summary.json: val_loss": "float",
    "files: file_preprocessing.json": "file",
    **{f"files: {job}{name}": "file" for job in JOBS for name in ("best.safetensors", "file_preprocessing.json")},
    **{f"files: {job}export/{name}": "file" for job in ("", *JOBS) for name in EXPORT},
    **{f"{place}: {name}": value for place, entries in FILE_PREPROCESSING.items() for name, value in entries.items()},
    **{f"{name}.safetensors: metadata.file_preprocessing": "str" for name in WEIGHTS},
}

# Run -> files that it left when the formats were recorded: those of an earlier best checkpoint.
PRUNED = {
    "images": {f"files: checkpoints/step_00000010/{name}" for name in ("rank_00000.safetensors", "state.json")},
}

# A section -> the one with the same entries, and what it has in addition.
ALIKE = {
    "best.safetensors": ("model.safetensors", {"metadata.best": "str", "metadata.format": "str"}),
    "best_ema.safetensors": ("model_ema.safetensors", {"metadata.best": "str", "metadata.format": "str"}),
}


def flat(layout: dict) -> dict:
    return {f"{section}: {key}": value for section, content in layout.items() for key, value in content.items()}


def check_format(name: str, runs) -> None:
    """Compare the files of a run, or of "sweep", with what was recorded."""
    found = flat((of_sweep if name == "sweep" else of_run)(runs.folder(name)))
    recorded = RECORDED[name]
    expected = flat(recorded)
    for section, (like, more) in ALIKE.items():
        if like in recorded:
            expected |= flat({section: recorded[like] | more})
    missing = expected.keys() - found.keys()
    assert missing == PRUNED.get(name, set())
    changed = {key: (value, found[key]) for key, value in expected.items() if key in found and found[key] != value}
    assert not changed, "(recorded, found)"
    unlisted = {key: value for key, value in found.items() if key not in expected and ADDED.get(key) != value}
    assert not unlisted
