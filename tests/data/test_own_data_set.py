"""The two data sets that vitkernels/data/__init__.py shows, as modules outside the package."""

import inspect
import json
import sys
import textwrap

import pytest
import torch
from expecting import error
from hydra.utils import get_method

import vitkernels.data
from vitkernels.data import InputSpec, Shard


def example(begin: str) -> str:
    """Return the indented block of the package's docstring that starts with this line's first words."""
    blocks, block = [], []
    for line in [*inspect.getdoc(vitkernels.data).splitlines(), "end"]:
        if line.startswith("    ") or (block and not line):
            block.append(line)
        elif block:
            blocks.append(textwrap.dedent("\n".join(block)))
            block = []
    return next(block for block in blocks if block.startswith(begin))


@pytest.fixture(params=["from vitkernels.data", "import itertools"], ids=["stripes", "stream"])
def own_data_set(request, tmp_path, monkeypatch):
    """The name of an importable module with one of the examples."""
    name = f"own_{request.param.split()[0]}"
    (tmp_path / f"{name}.py").write_text(example(request.param))
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_own_data_set__gives_resumable_batches(own_data_set, same):
    build = get_method(f"{own_data_set}.build")
    data = build(image_size=8, in_chans=3, seed=0, batch_size=4, train=True, items=50)
    assert data.train.batches_per_epoch == 12
    full = list(data.train.epoch(1))
    assert len(full) == 12
    for images, targets in full:
        assert images.shape == (4, 3, 8, 8) and images.dtype == torch.float32
        assert targets.shape == (4,) and targets.dtype == torch.int64 and targets.max() < data.num_classes
    assert same(data.train.epoch(1, start=5), full[5:])
    assert len(data.train.describe(data.train.sample_ids(0, 0))) in (0, 4)
    assert next(data.val.epoch(0))[0].shape == (4, 3, 8, 8)
    other = build(image_size=8, in_chans=3, seed=0, batch_size=2, shard=Shard(1, 2), items=50)
    assert other.train.batches_per_epoch == 12 and next(other.train.epoch(0))[0].shape == (2, 3, 8, 8)
    assert build(image_size=8, in_chans=3, seed=0, batch_size=4, train=False).train is None


def test_own_data_set__trains(own_data_set, settings, tmp_path):
    import train

    words = ["data=fake", "~data.val_items", "~data.num_classes", "~data.pool_batches", "data.items=40"]
    words += [f"data._target_={own_data_set}.build", "data.batch_size=4", "runtime=cpu", "attn=sdpa"]
    words += ["+model.kwargs.embed_dim=32", "+model.kwargs.num_heads=2", "+model.kwargs.depth=1"]
    words += ["trainer.max_steps=12"]
    train.run(settings(*words), tmp_path / "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["steps"] == 12 and summary["status"] == "done"


def test_input_spec__refuses_invalid_values():
    with error("data.value", setting="batch_size"):
        InputSpec(image_size=8, in_chans=3, seed=0, batch_size=0)
