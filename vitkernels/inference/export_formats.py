"""Export a trained model to files that load without this package, and check each against the plain timm model."""

import importlib.util
import json
import logging
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vitkernels.checkpoint.export import export_safetensors
from vitkernels.config.saved import find_run
from vitkernels.errors import UsageError, unknown_name
from vitkernels.inference.timm_folder import write_timm_folder
from vitkernels.inference.trained_model import TrainedModel

TOLERANCE = 1e-4  # largest difference of a logit: float32 sums in another order, over tens of layers
OPSET = 18
BATCHES = (2, 5)  # the second differs from the one that was traced


def export(trained: TrainedModel, kind: str, out: Path) -> float | None:
    """Write the model to `out` as FORMATS[kind] does, and return the largest difference of its logits from timm's.

    The batch size stays free. Formats that hold weights alone return None.

    Raises:
        UsageError: "unknown_name" for the format, "export.extra" if packages are missing, "export.exists" for a folder
            that would be replaced by a file and for the folder of a run, "export.differs" if the exported program's
            logits differ by more than TOLERANCE.
    """
    if kind not in FORMATS:
        raise unknown_name("export format", kind, FORMATS)
    suffix = FORMATS[kind].suffix
    if out.is_dir() and suffix is not None:
        message = f"{out} is a folder, and {kind} is one file: name a file, such as {out / 'model'}{suffix}"
        raise UsageError(message, code="export.exists", path=str(out))
    if suffix is None and find_run(out) == out:
        message = f"{out} is the folder of a run, whose config.json would be lost: name another, such as {out}/export"
        raise UsageError(message, code="export.exists", path=str(out))
    out.parent.mkdir(parents=True, exist_ok=True)
    difference = FORMATS[kind].write(trained, out)
    if difference is not None and not difference <= TOLERANCE:
        out.unlink(missing_ok=True)
        message = f"the logits of {out} differ by {difference:.2g} from timm's, more than {TOLERANCE:g}; it was removed"
        raise UsageError(message, code="export.differs", format=kind, difference=difference)
    return difference


def metadata(trained: TrainedModel) -> dict[str, Any]:
    """Return the metadata of an exported file: its outputs and its input."""
    cfg = trained.config["pretrained_cfg"]
    names = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")
    return {"class_names": trained.class_names, "preprocessing": {name: cfg[name] for name in names if name in cfg}}


def _timm(trained: TrainedModel, out: Path) -> None:
    write_timm_folder(trained, out)


def _safetensors(trained: TrainedModel, out: Path) -> None:
    if trained.weights.is_file() and out.exists() and out.samefile(trained.weights):
        return
    if trained.weights.is_file() and trained.weights.suffix == ".safetensors":
        shutil.copyfile(trained.weights, out)
    else:
        export_safetensors(trained.state_dict, out, metadata(trained))


def _torch_export(trained: TrainedModel, out: Path) -> float:
    model = trained.build()
    program = torch.export.export(model, (_images(trained, BATCHES[0]),), dynamic_shapes=({0: _batch()},))
    notes = {f"{name}.json": json.dumps(value) for name, value in metadata(trained).items()}
    torch.export.save(program, out, extra_files=notes)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # the weights are only read
        loaded = torch.export.load(out).module()
    return _difference(trained, model, lambda images: loaded(images).detach())


def _onnx(trained: TrainedModel, out: Path) -> float:
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        message = f"ONNX export needs {', '.join(missing)}: pip install 'vitkernels[export]'"
        raise UsageError(message, code="export.extra", missing=missing)
    import onnxruntime

    model = trained.build()
    # The exporter warns of its own deprecations, and of torchvision's operators, which no model here has.
    logging.getLogger("torch.onnx._internal.exporter._schemas").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model,
            (_images(trained, BATCHES[0]),),
            dynamo=True,
            opset_version=OPSET,
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: _batch()},),
            verbose=False,
        )
    assert program is not None
    for name, value in metadata(trained).items():
        program.model.metadata_props[name] = json.dumps(value)
    program.save(out)
    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])

    def run(images: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.asarray(session.run(["logits"], {"images": images.numpy()})[0]))

    return _difference(trained, model, run)


def _batch() -> torch.export.Dim:
    return torch.export.Dim("batch", min=1, max=1 << 16)


def _images(trained: TrainedModel, batch_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(batch_size)
    return torch.randn(batch_size, *trained.input_size, generator=generator)


@torch.no_grad()
def _difference(trained: TrainedModel, model: nn.Module, exported: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Return the largest absolute difference of a logit, over batches of several sizes."""
    batches = [_images(trained, size) for size in (1, *BATCHES)]
    return max(float((model(images) - exported(images)).abs().max()) for images in batches)


@dataclass(frozen=True)
class Format:
    """An export format.

    write: write a model to a path; return the largest difference of its logits from timm's, None for weights alone.
    suffix: of its file; None for a folder.
    """

    write: Callable[[TrainedModel, Path], float | None]
    suffix: str | None


FORMATS = {
    "timm": Format(_timm, None),  # for timm.create_model("local-dir:FOLDER") and the hub
    "safetensors": Format(_safetensors, ".safetensors"),  # class names and preprocessing are in the metadata
    "torch-export": Format(_torch_export, ".pt2"),  # for torch.export.load
    "onnx": Format(_onnx, ".onnx"),
}
