"""The files in conf/data match the functions that they name, and comment every key."""

import inspect
import itertools
from pathlib import Path

import pytest
from finished_batches import finished_epoch
from hydra.utils import get_method
from omegaconf import OmegaConf
from shard_fixtures import write_tars

FOLDER = Path(__file__).parents[2] / "conf" / "data"
FILES = sorted(FOLDER.glob("*.yaml"))
GIVEN = {"image_size", "in_chans", "seed", "train", "pin_memory", "shard"}  # passed by training


def parameters(config) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(get_method(config["_target_"])).parameters)


def test_conf_data__has_one_file_per_data_set():
    assert [path.stem for path in FILES] == ["digits", "fake", "imagefolder", "shapes", "shards", "table"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_conf_data__keys_and_defaults_match_the_function(path):
    config = OmegaConf.to_container(OmegaConf.load(path))
    expected = parameters(config)
    assert config.keys() - {"_target_"} == expected.keys() - GIVEN
    for name, parameter in expected.items():
        if parameter.default is not inspect.Parameter.empty and name not in GIVEN | {"num_workers"}:
            default = list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
            assert config[name] == pytest.approx(default, abs=1e-4) if default is not None else config[name] is None


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_conf_data__comments_every_key(path):
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    for before, line in itertools.pairwise(lines):
        if line and not line.startswith(("#", "_target_")):
            assert "# " in line or before.startswith("#"), line


def build(name, **overrides):
    config = OmegaConf.merge(OmegaConf.load(FOLDER / f"{name}.yaml"), overrides)
    arguments = OmegaConf.to_container(config)
    return get_method(arguments.pop("_target_"))(image_size=24, in_chans=3, seed=0, **arguments)


def test_conf_data__builds(make_root, tmp_path):
    mixup = {"mixup_alpha": 0.2, "cutmix_minmax": [0.2, 0.8]}
    folder = {"root": str(make_root()), "batch_size": 4, "num_workers": 0, "mixup": mixup}
    tars = folder | {"root": str(write_tars(tmp_path / "shards")), "cache": str(tmp_path / "cache")}
    sets = {"digits": {"mixup": mixup}, "fake": {"batch_size": 4}, "imagefolder": folder, "shards": tars}
    sets["shapes"] = {"batch_size": 4}
    (tmp_path / "labels.csv").write_text("path,split,targets\n" + "".join(
        f"{path},{path.parts[-3]},{path.parent.name}\n" for path in Path(folder["root"]).rglob("*.*")
    ))  # fmt: skip
    sets["table"] = folder | {"root": None, "table": str(tmp_path / "labels.csv")}
    for name, overrides in sets.items():
        data = build(name, **overrides)
        images, targets = next(finished_epoch(data.train, 0))
        assert images.shape == (data.train.batch_size, 3, 24, 24)
        assert targets.ndim == (1 if name in ("fake", "shapes") else 2)
