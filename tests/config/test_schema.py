"""The typed configuration: what it accepts, what it refuses, and that it agrees with conf/."""

import dataclasses

import pytest
from expecting import error
from omegaconf import OmegaConf

from vitkernels.config import COMPILE_MODES, Config, check_precision
from vitkernels.config.groups import AttentionSettings, DataSettings, TrainerSettings
from vitkernels.config.setting import groups_of, settings_of
from vitkernels.errors import UsageError


@pytest.mark.parametrize(
    ("override", "code", "fields"),
    [
        ("optim.lr=abc", "type", {"setting": "optim.lr", "value": "abc"}),
        ("optim.lr=inf", "range", {"setting": "optim.lr"}),
        ("optim.lr=nan", "range", {"setting": "optim.lr"}),
        ("optim.lr=-1", "range", {"setting": "optim.lr", "value": -1}),
        ("trainer.max_steps=0", "range", {"setting": "trainer.max_steps", "value": 0}),
        ("trainer.max_steps=1.5", "type", {"setting": "trainer.max_steps", "value": 1.5}),
        ("trainer.log_every=0", "range", {"setting": "trainer.log_every"}),
        ("trainer.log_every=null", "type", {"setting": "trainer.log_every", "value": None}),
        ("trainer.accum_steps=true", "type", {"setting": "trainer.accum_steps"}),
        ("trainer.clip_grad=0", "conflict", {"setting": "trainer.clip_grad"}),
        ("trainer.max_epochs=0", "conflict", {"setting": "trainer.max_epochs"}),
        ("trainer.profile=maybe", "choice", {"setting": "trainer.profile", "choices": ["true", "false"]}),
        ("ema.decay=0", "conflict", {"setting": "ema.decay"}),
        ("schedule.min_lr=1", "conflict", {"setting": "schedule.min_lr", "value": 1}),
        ("ema.decay=1.5", "range", {"setting": "ema.decay", "value": 1.5}),
        ("data.batch_size=-1", "range", {"setting": "data.batch_size"}),
        ("mode=evaluate", "choice", {"setting": "mode", "choices": ["train", "eval"]}),
        ("mode=eval", "conflict", {"setting": "checkpoint"}),
        ("schedule.sched=step", "choice", {"setting": "schedule.sched", "choices": ["cosine", "tanh", "poly"]}),
        ("compile=maybe", "choice", {"choices": ["true", "false", "auto", *COMPILE_MODES]}),
        ("model.name=null", "type", {"setting": "model.name", "value": None}),
        ("model=timm", "missing", {"setting": "model.name"}),
        ("+model.kwargs.img_size=[64,32]", "conflict", {"setting": "model.kwargs.img_size"}),
        ("+model.kwargs.num_classes=7", "conflict", {"setting": "model.kwargs.num_classes", "value": 7}),
        ("seed=4294967296", "range", {"setting": "seed"}),
        ("model.drop_path_rate=1.0", "range", {"setting": "model.drop_path_rate", "value": 1.0}),
        ("optim.lr=inf", "range", {"setting": "optim.lr"}),
        ("model.img_size=1000000", "range", {"setting": "model.img_size"}),
        ("data._target_=os.path.join", "target", {"setting": "data._target_", "value": "os.path.join"}),
        ("data._target_=os.getcwd", "target", {"value": "os.getcwd"}),
        ("evaluation=knn", "conflict", {"setting": "evaluation.name", "value": "knn"}),
        ("evaluation.name=svm", "choice", {"choices": ["head", "knn", "linear_probe"]}),
        ("checkpoint=4", "type", {"setting": "checkpoint"}),
        ("sweep.slots=0", "range", {"setting": "sweep.slots"}),
        ("sweep.slots=gpu", "type", {"setting": "sweep.slots", "choices": ["auto", "gpus", "null"]}),
        ("sweep.objective=[1]", "type", {"setting": "sweep.objective"}),
        ("parallel.lost_after=abc", "type", {"setting": "parallel.lost_after"}),
        ("optim.kwargs=3", "type", {"setting": "optim.kwargs"}),
        ("trainer=3", "type", {"setting": "trainer"}),
        ("quant=w8a8", "conflict", {"setting": "quant.name", "mode": "train"}),
        ("data._target_=data.nope.build", "target", {"setting": "data._target_", "value": "data.nope.build"}),
        ("data._target_=data.digits", "target", {"value": "data.digits"}),
        ("+data.degree=5", "unknown", {"setting": "data.degree"}),
        ("+data.shard=5", "unknown", {"setting": "data.shard"}),
        ("+trainer.max_step=5", "unknown", {"setting": "trainer.max_step"}),
        ("+sed=5", "unknown", {"setting": "sed"}),
        ("+base_lr=${oc.env:UNSET_IN_TESTS}", "interpolation", {"setting": "base_lr"}),
    ],
)
def test_wrong_setting__refused_with_code_and_fields(settings, override, code, fields):
    with error(f"config.{code}", **fields):
        Config.from_hydra(settings(override))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.max_steps=0", "trainer.max_steps must be an integer of at least 1 or null; got 0."),
        ("optim.lr=inf", "optim.lr must be a finite number of at least 0; got inf."),
        ("mode=evaluate", "mode must be one of train, eval; got 'evaluate'. Did you mean eval?"),
        ("sweep.slots=0", "sweep.slots must be an integer of at least 1, auto, gpus or null; got 0."),
        ("model.drop_path_rate=1", "model.drop_path_rate must be a number of at least 0 and below 1 or null; got 1."),
        ("model.kwargs=3", "model.kwargs must be a mapping; got 3. Add entries one by one: +model.kwargs.NAME=VALUE."),
        ("++quant.skip=head", "quant.skip must be a list of strings; got 'head'. A list is written quant.skip=[a,b]."),
        ("ema=0.9", "ema must be a mapping; got 0.9. Set its settings one by one, such as ema.decay=null"),
    ],
)
def test_wrong_setting__message(settings, override, message):
    with pytest.raises(UsageError) as caught:
        Config.from_hydra(settings(override))
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["knn", "linear_probe"])
def test_evaluation_by_features__is_refused_under_torchrun_before_anything_is_built(settings, monkeypatch, name):
    chosen = settings("mode=eval", "model.pretrained=true", f"evaluation={name}")
    Config.from_hydra(chosen)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with error("evaluation.processes", devices=2):
        Config.from_hydra(chosen)
    Config.from_hydra(settings())


def test_unknown_data_setting__suggests_the_nearest(settings):
    with error("config.unknown") as caught:
        Config.from_hydra(settings("+data.degree=5"))
    assert "degrees" in caught.value.fields["choices"] and "Did you mean data.degrees?" in str(caught.value)


def test_defaults__agree_with_yaml(settings, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    composed = OmegaConf.to_container(settings(), resolve=True)
    defaults = Config().to_dict()
    for name in ("attn", "ops", "quant", "model", "optim", "schedule", "runtime", "parallel", "logger", "evaluation"):
        assert defaults[name] == composed[name], name
    data = composed.pop("data")
    assert defaults.pop("data") == {name: data[name] for name in ("_target_", "batch_size", "num_workers")}
    assert defaults == composed


@pytest.mark.parametrize("option", ["w8a16", "w8a8_fp8", "int8", "w4a8_block"])
def test_quant_defaults__agree_with_yaml(settings, option):
    quant = OmegaConf.to_container(settings(f"quant={option}").quant)
    own = {"name", "dtype", "weight_bits", "activation_bits", "fp8", "block_size"}  # what a scheme chooses
    defaults = {each.name: each.default for each in settings_of(groups_of(Config)["quant"])}
    for name in quant.keys() - own:
        assert quant[name] == (list(defaults[name]) if isinstance(defaults[name], tuple) else defaults[name])


def test_to_dict__is_the_composed_mapping(settings):
    cfg = settings("attn=triton_flash", "quant=int8", "+optim.kwargs.betas=[0.9,0.95]", "+mine=3")
    config = Config.from_hydra(cfg)
    assert config.to_dict() == OmegaConf.to_container(cfg, resolve=True)
    config.to_dict()["optim"]["kwargs"]["betas"].append(1)
    assert config.to_dict()["optim"]["kwargs"]["betas"] == [0.9, 0.95]


def test_open_groups__collect_their_options(settings):
    config = Config.from_hydra(settings("attn=triton_flash", "attn.tiles.dq=64x32", "data=fake", "quant=int8"))
    assert config.attn == AttentionSettings("triton_flash", {"tiles": {"forward": None, "dq": "64x32", "dkdv": None}})
    assert config.data.target == "vitkernels.data.fake.build"
    assert config.data.arguments.keys() == {
        *("batch_size", "num_workers", "items", "val_items", "num_classes", "pool_batches")
    }
    assert (config.quant.dtype, config.quant.weight_bits, config.quant.skip) == ("int8", None, ("head",))


def test_config_in_python__needs_no_yaml():
    config = Config(trainer=TrainerSettings(max_steps=3), data=DataSettings(options={"augment": False}))
    assert Config.from_dict(config.to_dict()) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1


def test_every_setting__has_a_sentence():
    for group in (Config, *groups_of(Config).values()):
        assert group.__doc__.endswith(".") or group is Config
        for each in settings_of(group):
            assert each.text[0].isupper() or each.text.startswith(("auto", "torch.")), each.text
            assert each.text.endswith("."), each.text


def test_rounded_residual_stream__needs_16_bit_layers(settings):
    config = Config.from_hydra(settings("ops.residual_precision=bf16"))
    check_precision(config, "bf16")
    with error("config.conflict", setting="ops.residual_precision", precision="fp32"):
        check_precision(config, "fp32")
