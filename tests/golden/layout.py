"""Describe the layout of a run's files, recorded in formats.json: names, keys, types, tensors and TensorBoard tags.

The result is {section: {entry: description}}, with a section for each file or kind of file. A key within a key is
joined to it by a dot; [] stands for the elements of a list.
"""

import json
import re
from pathlib import Path

from safetensors import safe_open
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

# Depend on the machine: whether a package is installed, whether the code is in git, and what else runs.
_OF_THE_MACHINE = re.compile(r"(.*\.)?(versions\.\w.*|git_commit|commit|code|tuned|machine)")
_NOT_FROZEN = ("data._target_", "data.root", "command")  # module names may change; folders depend on the machine
# Keys whose values are part of the layout, besides all of config.json, class_names.json and preprocessing.json.
_VALUES = {
    "summary.json": "status model attn ops quant runtime precision compile parallel devices data batch_size "
    "train_flops_per_step parameters_without_gradient epochs steps seed",
    "eval.json": "model attn quant images bytes preprocessing",
    "state.json": "format step model_name seed images_per_step steps_per_epoch optimizer_name has_ema eval_pending "
    "class_names preprocessing",
}


def of_run(folder: Path) -> dict:
    """Return the layout of the folder of a training, an evaluation or one job of a sweep."""
    found = {"files": files(folder)}
    for path in sorted(folder.glob("*.json")):
        found |= of_json(path)
    if (folder / "metrics.jsonl").exists():
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found["metrics.jsonl, steps"] = types([line for line in lines if "loss" in line])
        found["metrics.jsonl, evaluations"] = types([line for line in lines if "loss" not in line])
        found["TensorBoard"] = tags(folder)
    checkpoints = sorted((folder / "checkpoints").glob("step_*"))
    if checkpoints:
        found |= of_json(checkpoints[-1] / "state.json")
    weights = [path for place in (folder, *checkpoints[-1:]) for path in sorted(place.glob("*.safetensors"))]
    return found | {path.name: tensors(path) for path in weights}


def of_json(path: Path) -> dict:
    content = json.loads(path.read_text())
    if path.name not in _VALUES:
        return {path.name: values(content)}
    chosen = {name: content.get(name) for name in _VALUES[path.name].split()}
    return {path.name: types(content), f"{path.name}, values": chosen}


def of_sweep(folder: Path) -> dict:
    """Return the layout of a sweep's own folder, without its jobs, which are runs."""
    found = {"files": files(folder), "comparison.json": types(json.loads((folder / "comparison.json").read_text()))}
    jobs = [json.loads(path.read_text()) for path in sorted(folder.glob("*/job.json"))]
    return found | {"job.json": types(jobs)}


def files(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        name = re.sub(r"(events\.out\.tfevents)\..*", r"\1.*", str(path.relative_to(folder)))
        if path.is_symlink():
            found[name] = "link"
        elif path.is_file():
            found[name] = "file"
    return found


def types(content, prefix: str = "") -> dict[str, str]:
    """Return {key: type}; several types of one key are joined by |."""
    found: dict[str, set[str]] = {}
    _collect(content, prefix, found)
    return {key: " | ".join(sorted(kinds)) for key, kinds in found.items()}


def _collect(content, key: str, found: dict[str, set[str]]) -> None:
    if _OF_THE_MACHINE.fullmatch(key):
        found[key] = {"any"}
    elif isinstance(content, dict) and content:
        for name, value in content.items():
            _collect(value, f"{key}.{name}" if key else name, found)
    elif isinstance(content, list) and content:
        for value in content:
            _collect(value, f"{key}[]", found)
    else:
        found.setdefault(key, set()).add(type(content).__name__)


def values(content: dict | list, prefix: str = "") -> dict:
    """Return {key: value}; a list is one value."""
    if isinstance(content, list):
        return {"[]": content}
    found = {}
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            found |= values(value, f"{key}.")
        else:
            found[key] = "any" if key in _NOT_FROZEN else value
    return found


def tensors(path: Path) -> dict[str, str]:
    """Return {name: type and shape}, and the keys of the file's metadata."""
    with safe_open(path, "pt") as file:
        found = {f"metadata.{key}": "str" for key in sorted(file.metadata() or {})}
        for name in file.keys():  # noqa: SIM118 (a safe_open is no dict)
            part = file.get_slice(name)
            found[name] = f"{part.get_dtype()} {part.get_shape()}"
    return found


def tags(folder: Path) -> dict[str, str]:
    """Return TensorBoard's tags, and the names in its HPARAMS tab."""
    board = EventAccumulator(str(folder))
    board.Reload()
    found = dict.fromkeys(board.Tags()["scalars"], "scalar")
    found |= dict.fromkeys(board.Tags()["images"], "image")
    for tag in board.Tags()["tensors"]:
        found[tag] = board.SummaryMetadata(tag).plugin_data.plugin_name
    for tag, content in board.PluginTagToContent("hparams").items():
        data = HParamsPluginData.FromString(content)
        found[tag] = "hparams"
        found |= {f"{tag}: {name}": "parameter" for name in data.session_start_info.hparams}
        found |= {f"{tag}: {one.name}": "parameter" for one in data.experiment.hparam_infos}
        found |= {f"{tag}: {one.name.tag}": "metric" for one in data.experiment.metric_infos}
    return dict(sorted(found.items()))
