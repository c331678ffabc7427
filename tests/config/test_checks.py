"""Wrong settings are found before anything is built."""

import pytest

from vitkernels.config.checks import _CHOICES, _NUMBERS, check_precision, check_settings
from vitkernels.errors import UsageError


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr=abc", "optim.lr must be a number of at least 0; got 'abc'"),
        ("trainer.max_steps=0", "trainer.max_steps must be a whole number of at least 1, or null; got 0"),
        ("trainer.max_steps=1.5", "whole number"),
        ("trainer.log_every=0", "trainer.log_every"),
        ("trainer.accum_steps=true", "trainer.accum_steps"),
        ("trainer.clip_grad=0", "null does not clip"),
        ("ema.decay=0", "null keeps no average"),
        ("ema.decay=1.5", "ema.decay must be a number from 0 to 1, or null"),
        ("data.batch_size=-1", "data.batch_size"),
        ("mode=evaluate", "mode must be one of train, eval"),
        ("mode=eval", "checkpoint=PATH"),
        ("schedule.sched=step", "schedule.sched must be one of cosine, tanh, poly; got 'step'"),
        ("compile=maybe", "compile must be one of True, False, auto"),
        ("model.name=null", "model.name must be a name"),
        (
            "+model.kwargs.img_size=[64,32]",
            "model.kwargs.img_size is not .*: it is model.img_size",
        ),
        ("+model.kwargs.num_classes=7", "the data set has the number of classes"),
        ("seed=4294967296", "seed must be a whole number from 0 to 2147483648"),
        ("parallel.lost_after=abc", "parallel.lost_after must be a number"),
        ("trainer.profile=maybe", "trainer.profile must be one of True, False; got 'maybe'"),
        ("data._target_=data.nope.build", "data._target_=data.nope.build is no function that can be imported"),
        ("data._target_=data.digits", "is no function"),
        (
            "+data.degree=5",
            "unknown data setting .of vitkernels.data.digits.build. 'degree'; known: augment.*Did you mean 'degrees'",
        ),
        ("+data.shard=5", "unknown data setting .of vitkernels.data.digits.build. 'shard'"),
    ],
)
def test_wrong_values(settings, override, message):
    with pytest.raises(UsageError, match=message):
        check_settings(settings(override))


def test_defaults_pass_and_every_checked_setting_exists(settings):
    from omegaconf import OmegaConf

    cfg = settings()
    check_settings(cfg)
    missing = object()
    assert [name for name in (*_NUMBERS, *_CHOICES) if OmegaConf.select(cfg, name, default=missing) is missing] == []


def test_a_rounded_residual_stream_needs_layers_in_16_bits(settings):
    cfg = settings("ops.residual_precision=bf16")
    check_precision(cfg, "bf16")
    with pytest.raises(UsageError, match="precision is fp32 here"):
        check_precision(cfg, "fp32")
