"""Command-line arguments: which are quoted, moved, refused or marked as settings of an earlier run."""

import os
from pathlib import Path

import pytest
from expecting import error

from vitkernels.cli.overrides import (
    allow_settings_of_a_run,
    check_added,
    check_groups,
    check_options,
    options_last,
    parse,
    prepare,
    quote_value,
)

CONF = str(Path(__file__).resolve().parents[2] / "conf")


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("/tmp/my images (new)", "/tmp/my images (new)"),
        ("~/nope", os.path.expanduser("~/nope")),
        ("runs/attn=sdpa/best", "runs/attn=sdpa/best"),
        ("/tmp/bücher", "/tmp/bücher"),
    ],
)
def test_quote_value__quotes_paths(value, meant):
    override = parse(quote_value(f"data.root={value}"))
    assert override.value() == meant and not override.is_sweep_override()


@pytest.mark.parametrize(
    "value", ["~/a,~/b", "tag(log, interval(1e-5, 1e-2))", "choice(a,b", "{a: 1", "[0.5", '"a b', "a,b", "1e-3", "a b"]
)
def test_quote_value__leaves_valid_and_ambiguous_values_alone(value):
    assert quote_value(f"optim.lr={value}") == f"optim.lr={value}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("-m a=1 --config-dir mine b=2", "a=1 b=2 -m --config-dir mine"),
        ("-cd mine a=1", "a=1 -cd mine"),
        ("--config-dir=mine a=1", "a=1 --config-dir=mine"),
        ("--info a=1", "a=1 --info"),
        ("--cfg job a=1 -p data", "a=1 --cfg job -p data"),
        ("-sc query=bash", "query=bash -sc"),
    ],
)
def test_options_last__keeps_their_values(words, expected):
    assert options_last(words.split()) == expected.split()


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--resume", "runs/a"], "resume=VALUE"),
        (["--data.batch-size=3"], "data.batch_size=VALUE"),
        (["--lr", "3"], "Did you mean optim.lr? "),
        (["--cfg", "nosuch"], "'job'"),
        (["--config-dir"], "expected one argument"),
    ],
)
def test_check_options__names_the_fix_in_one_line(words, fix):
    with error("cli.options") as caught:
        check_options(words, CONF)
    assert fix in str(caught.value) and "\n" not in str(caught.value)


def test_check_options__accepts_options_of_hydra():
    check_options(["a=1", "-m", "--cfg", "job", "-cd", "mine", "--info"], CONF)
    check_options(["--help"], CONF)


@pytest.mark.parametrize(("word", "value"), [("model=3", 3), ("data={batch_size: 4}", {"batch_size": 4})])
def test_check_groups__refuses_numbers_and_mappings(word, value):
    with error("cli.option", group=word.partition("=")[0], name=value):
        check_groups([word], CONF)
    check_groups(["model=timm", "seed=3", "data=fake,digits", "trainer={max_steps: 3}", "--info"], CONF)


@pytest.mark.parametrize(
    ("word", "code", "setting", "hint"),
    [
        ("+trainer.max_step=5", "added", "trainer.max_step", "Did you mean trainer.max_steps"),
        ("++foo=1", "added", "foo", "model.kwargs.NAME"),
        ("+optim.momentum=0.9,0.8", "added", "optim.momentum", "Did you mean optim.kwargs.momentum"),
        ("+parallel.foo=1", "added", "parallel.foo", ""),
        ("++trainer={max_step: 5}", "added", "trainer.max_step", ""),
        ("+trainer.max_steps=5", "exists", "trainer.max_steps", ""),
        ("+experiment=rise_of_pallas", "group", "experiment", "experiment=NAME"),
    ],
)
def test_check_added__rejects_unused_settings(word, code, setting, hint):
    with error(f"cli.{code}", setting=setting) as caught:
        check_added([word], CONF)
    assert hint in str(caught.value)


def test_check_added__accepts_used_settings():
    words = ["+model.kwargs.depth=2", "+optim.kwargs.betas=[0.9,0.95]", "+attn.tiles.dq=64x32", "+data.mine=1"]
    words += ["+hydra.job.env_set.A=1", "++trainer.max_steps=5", "++quant.skip=[head]", "+data.mixup.prob=0.5"]
    check_added(words, CONF)
    check_added(["--config-dir", "mine", "+recipe=mine"], CONF)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("mode=eval data.root=x", "mode=eval ++data.root=x"),
        ("resume=runs/a attn.tiles.dq=64x32", "resume=runs/a ++attn.tiles.dq=64x32"),
        ("resume=runs/a optim.kwargs.momentum=0.8 optim.lr=1", "resume=runs/a ++optim.kwargs.momentum=0.8 optim.lr=1"),
        ("mode=eval data=imagefolder data.root=x", "mode=eval data=imagefolder data.root=x"),
        ("mode=eval +data.mine=x", "mode=eval +data.mine=x"),
        ("resume=auto data.root=x", "resume=auto data.root=x"),
        ("data.root=x", "data.root=x"),
    ],
)
def test_settings_of_a_run__may_be_ones_the_defaults_lack(words, expected):
    assert allow_settings_of_a_run(words.split()) == expected.split()


def test_prepare__quotes_orders_and_opens():
    words = ["-m", "mode=eval", "checkpoint=runs/attn=sdpa", "data.root=x"]
    assert prepare(words, CONF) == ["mode=eval", 'checkpoint="runs/attn=sdpa"', "++data.root=x", "-m"]


@pytest.mark.parametrize(
    ("word", "code"), [("=3", "cli.syntax"), ("hydra.run.dir=", "cli.no_folder"), ("hydra.sweep.dir=", "cli.no_folder")]
)
def test_prepare__refuses_values_and_folders_without_names(word, code):
    with error(code):
        prepare(["seed=3", word], CONF)
    assert prepare(["hydra.run.dir=."], CONF) == ["hydra.run.dir=."]
