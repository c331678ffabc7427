"""Exported models load without this package, and give the run's own logits."""

import json
from pathlib import Path

import forked
import pytest
import torch
from expecting import error

from vitkernels.cli.main import main as console
from vitkernels.inference import open_trained
from vitkernels.inference.export_formats import FORMATS, Format, export
from vitkernels.models import create_model

# Blocks this package, then loads the export and writes the logits of a batch of 3.
LOAD = """
import sys
sys.modules["vitkernels"] = None
import json, torch
kind, path, images, out = sys.argv[1:]
images = torch.load(images)
if kind == "timm":
    import timm
    model = timm.create_model("local-dir:" + path, pretrained=True).eval()
    data = timm.data.resolve_model_data_config(model)
    print(json.dumps({"names": model.pretrained_cfg.get("label_names"), **data}))
elif kind == "safetensors":
    import timm
    from safetensors import safe_open
    from safetensors.torch import load_file
    args = dict(img_size=16, patch_size=4, in_chans=images.shape[1], embed_dim=32, num_heads=1, depth=1)
    model = timm.create_model("vit_base_patch16_224", class_token=False, global_pool="avg", num_classes=10, **args)
    model.load_state_dict(load_file(path))
    model.eval()
    with safe_open(path, "pt") as file:
        print(json.dumps({"names": json.loads(file.metadata()["class_names"])}))
elif kind == "torch-export":
    notes = {"class_names.json": ""}
    model = torch.export.load(path, extra_files=notes).module()
    print(json.dumps({"names": json.loads(notes["class_names.json"])}))
else:
    import onnx, onnxruntime
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    model = lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
    notes = {each.key: each.value for each in onnx.load(path).metadata_props}
    print(json.dumps({"names": json.loads(notes["class_names"])}))
with torch.no_grad():
    torch.save(model(images), out)
"""


def load_elsewhere(kind: str, path: Path, images: torch.Tensor, folder: Path) -> tuple[torch.Tensor, dict]:
    """Return the logits of the export in a process without this package, and what the export says of its data."""
    torch.save(images, folder / "images.pt")
    words = [kind, str(path), str(folder / "images.pt"), str(folder / "logits.pt")]
    run = forked.run(["-c", LOAD, *words], folder)
    assert run.returncode == 0, run.stderr
    return torch.load(folder / "logits.pt"), json.loads(run.stdout)


def own_logits(run: Path, weights: str, images: torch.Tensor, name: str = "vit_digits", **kwargs) -> torch.Tensor:
    """Return the logits of this package's model with the weights of a run."""
    from safetensors.torch import load_file

    model = create_model(name, "native", embed_dim=32, num_heads=1, depth=1, **kwargs)
    model.load_state_dict(load_file(run / weights))
    with torch.no_grad():
        return model.eval()(images)


@pytest.mark.parametrize(
    "kind", ["timm", "safetensors", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("torch-export", "onnx"))]
)
def test_export__gives_the_logits_of_the_run_without_this_package(kind, trained_run, tmp_path):
    if kind == "onnx":
        pytest.importorskip("onnxruntime", reason="needs vitkernels[export]")
        pytest.importorskip("onnxscript", reason="needs vitkernels[export]")
    run, out = trained_run("trainer.max_steps=3"), tmp_path / ("model" if kind == "timm" else "model.file")
    export(open_trained(run), kind, out)
    images = torch.randn(3, 1, 16, 16)
    logits, notes = load_elsewhere(kind, out, images, tmp_path)
    torch.testing.assert_close(logits, own_logits(run, "best.safetensors", images, num_classes=10), atol=1e-4, rtol=0)
    assert notes["names"] == [str(digit) for digit in range(10)]


def test_run__leaves_a_folder_that_timm_loads_with_its_preprocessing(trained_run, image_folder, tmp_path):
    words = ["data=imagefolder", f"data.root={image_folder}", "data.num_workers=0", "model.in_chans=3"]
    words += ["data.crop_pct=0.8", "data.mean=[0.4,0.5,0.6]", "data.interpolation=bilinear", "trainer.max_steps=3"]
    run, images = trained_run(*words), torch.randn(3, 3, 16, 16)
    logits, data = load_elsewhere("timm", run / "export", images, tmp_path)
    expected = own_logits(run, "best.safetensors", images, num_classes=6, in_chans=3)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert data["names"] == ["blue", "gray", "green", "pink", "red", "white"]
    assert (data["crop_pct"], data["interpolation"], data["mean"]) == (0.8, "bilinear", [0.4, 0.5, 0.6])
    card = (run / "export" / "README.md").read_text()
    best = json.loads((run / "summary.json").read_text())["best"]
    assert f"{best['top1']:.2f} %" in card and "local-dir" in card and "`pink`" in card
    assert str(image_folder) not in card


@pytest.mark.parametrize("kernels", [("attn=triton_flash", "ops=fused"), ("attn=native", "quant=int8")])
def test_run_with_kernels_or_8_bit_layers__exports_plain_timm(kernels, trained_run, tmp_path):
    """Kernels are interpreted here, so the run has one step."""
    pytest.importorskip("triton", reason="no Triton on this platform")
    words = ["trainer.max_steps=1", "data.batch_size=4", "data=fake", "data.items=8", "data.val_items=4"]
    run, images = trained_run(*kernels, *words, "data.num_classes=10"), torch.randn(2, 1, 16, 16)
    logits, data = load_elsewhere("timm", run / "export", images, tmp_path)
    expected = own_logits(run, "best.safetensors", images, num_classes=10)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert data["names"] is None  # fake images have no class names


def test_which__selects_best_last_or_ema(trained_run):
    run = trained_run("trainer.max_steps=3", "ema.decay=0.9")
    named = {which: open_trained(run, which).weights.name for which in ("best", "last", "ema")}
    assert named == {"best": "best_ema.safetensors", "last": "model.safetensors", "ema": "model_ema.safetensors"}
    assert open_trained(run / "best.safetensors").weights.name == "best.safetensors"
    plain = trained_run("trainer.max_steps=3")
    with error("inference.no_weights", which="ema", choices=["best", "last"]):
        open_trained(plain, "ema")


def test_open_trained__refuses_a_path_that_belongs_to_no_run(tmp_path):
    with error("inference.no_run"):
        open_trained(tmp_path)
    with error("inference.no_run"):
        open_trained(tmp_path / "missing")


def test_export__refuses_a_program_that_differs(trained_run, monkeypatch, tmp_path):
    def differs(trained, out):
        out.write_bytes(b"")
        return 0.5

    monkeypatch.setitem(FORMATS, "onnx", Format(differs, ".onnx"))
    with error("export.differs", format="onnx", difference=0.5):
        export(open_trained(trained_run("trainer.max_steps=3")), "onnx", tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


def test_export_command__names_the_file_of_each_format(trained_run, monkeypatch):
    """The suffix belongs to the format: a format that is added to the table needs no other change."""
    run, written = trained_run("trainer.max_steps=3"), []
    monkeypatch.setitem(FORMATS, "names", Format(lambda trained, out: written.append(out), ".txt"))
    assert not console(["export", str(run), "--format", "names"])
    assert written == [run / "export" / "model.txt"]


def test_export__leaves_the_settings_of_a_run(trained_run):
    run = trained_run("trainer.max_steps=3")
    before = (run / "config.json").read_bytes()
    with error("export.exists", path=str(run)):
        export(open_trained(run), "timm", run)
    assert (run / "config.json").read_bytes() == before


@pytest.mark.parametrize("kind", [kind for kind, format in FORMATS.items() if format.suffix])
def test_export__to_a_single_file_refuses_a_folder(kind, trained_run, tmp_path):
    with error("export.exists"):
        export(open_trained(trained_run("trainer.max_steps=3")), kind, tmp_path)
