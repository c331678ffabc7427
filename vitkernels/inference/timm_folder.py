"""Write trained weights as a folder in timm's hub layout, which `timm.create_model("local-dir:FOLDER")` loads."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from vitkernels.checkpoint.export import export_safetensors
from vitkernels.config.saved import read_settings
from vitkernels.files import read_json, write_atomically, write_json
from vitkernels.inference.trained_model import TrainedModel

NAME = "export"  # the folder in a run's folder

_CARD = """---
library_name: timm
pipeline_tag: image-classification
tags:
- image-classification
- timm
---
# {title}

{what} trained with vitkernels, {device}.

## Data

{data}

Images of evaluation: {size}, {preparation}.

## Accuracy

{accuracy}

## Load

```python
import timm
import torch
from PIL import Image

model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()  # hf-hub:USER/NAME for one on the hub
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
image = Image.open("image.png").convert("{mode}")
with torch.no_grad():
    probabilities = model(transform(image)[None]).softmax(-1)[0]
names = model.pretrained_cfg.get("label_names") or range(len(probabilities))
print(names[int(probabilities.argmax())], float(probabilities.max()))
```

## Settings

{provenance}

```json
{settings}
```
"""


def write_timm_folder(trained: TrainedModel, folder: Path) -> None:
    """Write config.json, model.safetensors and README.md, each atomically; earlier ones are replaced.

    The weights are linked to the run's file where the file system can, and copied elsewhere.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _place_weights(trained, folder / "model.safetensors")
    write_json(folder / "config.json", trained.config)
    write_atomically(folder / "README.md", lambda file: file.write(model_card(trained).encode()))


def _place_weights(trained: TrainedModel, path: Path) -> None:
    if trained.weights.is_dir():  # a checkpoint
        export_safetensors(trained.state_dict, path, {"class_names": trained.class_names})
        return
    staged = path.with_name(path.name + ".tmp")
    staged.unlink(missing_ok=True)
    try:
        os.link(trained.weights, staged)
    except OSError:  # another file system, or one without links
        shutil.copyfile(trained.weights, staged)
    os.replace(staged, path)
    staged.unlink(missing_ok=True)  # renaming a link to the file that it already is does nothing


def model_card(trained: TrainedModel) -> str:
    """Return the model card: architecture, data, accuracy, how to load it, and settings."""
    settings = read_settings(trained.run) if trained.run else {}
    summary = (read_json(trained.run / "summary.json") if trained.run else None) or {}
    cfg, data = trained.config["pretrained_cfg"], dict(settings.get("data", {}))
    model, names = settings.get("model", {}).get("name", trained.config["architecture"]), trained.class_names
    data.pop("root", None)  # paths of the machine
    settings = {name: value for name, value in settings.items() if name != "checkpoint"}
    target = str(data.get("_target_", "unknown")).rsplit(".", 2)[-2:]
    channels, size, _ = trained.input_size
    listed = ", ".join(f"`{name}`" for name in names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    return _CARD.format(
        title=f"{model}, {len(names)} classes",
        what=f"`{model}` (timm architecture `{trained.config['architecture']}`)",
        device=f"on {summary.get('device', 'an unknown device')} in {summary.get('precision', 'unknown precision')}",
        data=f"Data set: `{target[0]}`. Classes: {listed}.",
        size=f"{channels} × {size} × {size}",
        preparation=", ".join(f"{key} {cfg[key]}" for key in ("mean", "std", "interpolation", "crop_pct", "crop_mode")),
        accuracy=_accuracy(trained, summary),
        mode="L" if channels == 1 else "RGB",
        provenance=_provenance(summary),
        settings=json.dumps({**settings, "data": data}, indent=1),
    )


def _accuracy(trained: TrainedModel, summary: dict[str, Any]) -> str:
    best = summary.get("best") or {}
    if trained.weights.name.startswith("best") and "loss" in best:
        return (
            f"Top-1 accuracy {best['top1']:.2f} %, loss {best['loss']:.4f}, on the evaluation images after step "
            f"{best['step']} (epoch {best['epoch']:g}). This is the best evaluation of the run, so it is optimistic: "
            "the same images chose the step."
        )
    name = "val_ema_top1" if trained.weights.name == "model_ema.safetensors" else "val_top1"
    if trained.weights.name.startswith("model") and summary.get(name) is not None:
        return f"Top-1 accuracy {summary[name]:.2f} % on the evaluation images after the last step."
    return "These weights were not evaluated."


def _provenance(summary: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in (summary.get("versions") or {}).items() if version)
    commit = summary.get("git_commit")
    steps = f"{summary.get('steps', 'unknown')} steps, seed {summary.get('seed')}"
    return f"Commit {commit or 'unknown'}; {steps}; {versions}."
