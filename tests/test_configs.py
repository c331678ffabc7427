"""Every file in conf/ composes into valid settings and names objects that exist."""

import functools
from pathlib import Path

import pytest
import timm
import torch
from hydra.utils import get_method
from omegaconf import OmegaConf

from vitkernels import attention, runtime
from vitkernels.config import Config
from vitkernels.config.setting import groups_of, settings_of
from vitkernels.models import PRESETS, ModelFacts, create_model, input_spec, inspect_model
from vitkernels.runtime.cuda import CudaRuntime
from vitkernels.runtime.xla import XlaRuntime

CONF = Path(__file__).resolve().parents[1] / "conf"
FILES = sorted(p.relative_to(CONF).with_suffix("") for p in CONF.rglob("*.yaml") if p.parent != CONF)
GROUPED = [str(path) for path in FILES if path.parts[0] != "hydra"]


def test_defaults__need_no_home_folder(settings, monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert OmegaConf.to_container(settings(), resolve=True)["sweep"]["compile_cache"] == "~/.cache/vitkernels"


@functools.cache
def facts_of(model: str) -> ModelFacts:
    """Return the facts of a model by its name alone, once for the many options that keep the default model."""
    size, chans = input_spec(model)
    return inspect_model(
        lambda backend: create_model(model, backend, num_classes=10),
        image_size=size, in_chans=chans, batch_size=1, dtype=torch.float32, device_type="cpu",
    )  # fmt: skip


@pytest.mark.parametrize("path", GROUPED)
def test_option__composes_and_passes_the_checks(path, settings):
    group, option = path.split("/")
    overrides = [f"{group}={option}"]
    if path == "model/timm":
        overrides.append("model.name=vit_tiny_patch16_224")
    if path in ("data/imagefolder", "data/shards"):
        overrides.append("data.root=somewhere")
    if path == "data/table":
        overrides.append("data.table=somewhere.csv")
    cfg = settings(*overrides)
    quantizes = group == "quant" and "dtype" not in cfg.quant and option != "none"
    if quantizes or (group == "evaluation" and option != "head"):  # for trained weights
        cfg = settings(*overrides, "mode=eval", "checkpoint=somewhere")
    Config.from_hydra(cfg)
    assert cfg.attn.name in attention.names()
    assert cfg.runtime.name in runtime.names()
    assert callable(get_method(cfg.data._target_))
    assert cfg.model.name in PRESETS or timm.is_model(cfg.model.name)
    facts = facts_of(cfg.model.name)
    assert facts.parameters > 1e4 and facts.attention


def test_attention_backends__match_the_files_in_conf():
    assert {path.stem for path in (CONF / "attn").glob("*.yaml")} == set(attention.names())


@pytest.mark.parametrize("path", [str(p) for p in FILES])
def test_file__begins_with_an_explanation(path):
    lines = (CONF / f"{path}.yaml").read_text().splitlines()
    assert (
        any(line.startswith("# ") and "@package" not in line for line in lines[:3]) or path == "hydra/help/vitkernels"
    )


def comments(path: Path) -> dict[str, str]:
    """The comment of each key in a YAML file, as one line: the lines above it and the rest of its own line."""
    found, above, groups = {}, [], []
    for line in path.read_text().splitlines():
        code, _, comment = line.partition("#")
        if not code.strip():
            above = [*above, comment.strip()] if comment else []
            continue
        depth = (len(code) - len(code.lstrip())) // 2
        groups = [*groups[:depth], code.split(":")[0].strip()]
        found[".".join(groups)] = " ".join([*above, comment.strip()]).strip()
        above = []
    return found


# The file of each group with a comment on every setting.
EXPLAINED = {
    **dict.fromkeys(("trainer", "ema", "distill", "checkpoints", "sweep"), "config"),
    **{group: f"{group}/auto" for group in ("attn", "ops", "runtime", "parallel")},
    **{"quant": "quant/w8a8_fp8", "model": "model/timm", "data": "data/digits"},
    **{"optim": "optim/adamw", "schedule": "schedule/cosine", "logger": "logger/none", "evaluation": "evaluation/head"},
}


@pytest.mark.parametrize("group", ["", *EXPLAINED])
def test_yaml_comment__is_the_schema_sentence(group):
    found = comments(CONF / f"{EXPLAINED.get(group, 'config')}.yaml")
    prefix = f"{group}." if EXPLAINED.get(group) == "config" else ""
    settings = settings_of(groups_of(Config)[group] if group else Config)
    for each in settings:
        # A file's first lines explain its name; quant.dtype is in other files than the rest.
        if each.name not in ("name", "dtype") and not each.description.collects_rest:
            assert each.text in found[f"{prefix}{each.name}"], each.name


def test_rise_of_pallas__matches_the_publication(settings):
    cfg = settings("experiment=rise_of_pallas", "attn=sdpa")
    assert (cfg.model.name, cfg.data.batch_size, cfg.optim.opt) == ("vit_b16_256", 128, "sgd")
    assert (cfg.data["items"], cfg.data.num_classes, cfg.runtime.precision) == (1_000_000, 1024, "auto")
    assert CudaRuntime.default_precision == XlaRuntime.default_precision == "bf16"
    assert (cfg.trainer.max_steps, cfg.trainer.warmup_steps, cfg.attn.name) == (100, 20, "sdpa")


def test_model_name__needs_no_group(settings):
    assert settings("model.name=vit_base_patch16_224").model.name == "vit_base_patch16_224"
    assert input_spec("vit_base_patch16_224") == (224, 3)
    assert input_spec("vit_digits") == (16, 1)
