"""The command line: how mistakes are explained, which words are quoted, and what may be added with +."""

import os
from pathlib import Path

import pytest

from vitkernels.cli import command_line
from vitkernels.errors import EXIT_INTERRUPTED, UsageError

CONF = str(Path(__file__).resolve().parents[2] / "conf")


@pytest.mark.parametrize(("words", "setting"), [([], "hydra.run.dir"), (["-m", "seed=0,1"], "hydra.sweep.dir")])
def test_run__results_folder_cannot_be_created(words, setting, monkeypatch, capsys):
    def main():  # Hydra makes the folder before it calls ours
        raise OSError(30, "Read-only file system", "/mnt/runs")

    monkeypatch.setattr("sys.argv", ["train.py", *words])
    monkeypatch.setattr(command_line.hydra, "main", lambda **_: lambda job: main)
    assert command_line.run(main, CONF) == 2
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith(
        "error: the folder of the results cannot be written: [Errno 30] Read-only file system: '/mnt"
    )
    assert said.endswith(f"{setting}=FOLDER is another")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("attn=nosuch", "unknown attn 'nosuch'; known: auto"),
        ("trainer.max_step=3", "there is no setting 'trainer.max_step'. Did you mean trainer.max_steps"),
        ("checkpoint=runs/attn=sdpa/best", "quotes of its own: 'checkpoint=\"runs/attn=sdpa/best\"'"),
        ("nonsense", "cannot read 'nonsense': a setting is name=value"),
        ("data.root=~/a,b", "quotes of its own: 'data.root=\"~/a,b\"'"),
        ("data.scale=[0.5", "a list needs its ]"),
        (
            "attn=native,sdpa",
            "'attn=native,sdpa' has several values: python train.py -m ... makes a sweep of them; a comma",
        ),
        ("optim.lr=interval(1e-4, 1e-2)", "-m ... makes a sweep"),
        ("data.root=/tmp", "no setting 'data.root' here: it belongs to data=imagefolder."),
        ("model.kwargs.depth=2", "+model.kwargs.depth=... adds it"),
    ],
)
def test_explain__names_value_and_fix(override, message):
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    with initialize_config_dir(CONF, version_base="1.3"), pytest.raises(HydraException) as error:
        compose("config", overrides=[override])
    assert message in command_line.explain(error.value, CONF)


def test_no_setting__does_not_suggest_plus_for_closed_groups():
    assert "+" not in command_line._no_setting("trainer.max_step", {"trainer.max_steps": []})


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("/tmp/my images (new)", "/tmp/my images (new)"),
        ("~/nope", os.path.expanduser("~/nope")),
        ("runs/attn=sdpa/best", "runs/attn=sdpa/best"),
        ("/tmp/bücher", "/tmp/bücher"),
    ],
)
def test_readable__quotes_paths(value, meant):
    override = command_line._parsed(command_line.readable(f"data.root={value}"))
    assert override.value() == meant and not override.is_sweep_override()


@pytest.mark.parametrize(
    "value", ["~/a,~/b", "tag(log, interval(1e-5, 1e-2))", "choice(a,b", "{a: 1", "[0.5", '"a b', "a,b", "1e-3", "a b"]
)
def test_readable__leaves_valid_and_ambiguous_values_alone(value):
    assert command_line.readable(f"optim.lr={value}") == f"optim.lr={value}"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("+trainer.max_step=5", "nothing reads a setting 'trainer.max_step'. Did you mean trainer.max_steps"),
        ("++foo=1", "nothing reads a setting 'foo'.*model.kwargs.NAME"),
        ("+optim.momentum=0.9,0.8", "nothing reads a setting 'optim.momentum'. Did you mean optim.kwargs.momentum"),
        ("+parallel.foo=1", "nothing reads a setting 'parallel.foo'"),
        ("++trainer={max_step: 5}", "nothing reads a setting 'trainer.max_step'"),
        ("+trainer.max_steps=5", "trainer.max_steps is one already"),
        ("+experiment=rise_of_pallas", "choose with experiment=NAME, without"),
    ],
)
def test_check_added__rejects_unused_settings(word, message):
    with pytest.raises(UsageError, match=message):
        command_line.check_added([word], CONF)


def test_check_added__accepts_used_settings():
    words = ["+model.kwargs.depth=2", "+optim.kwargs.betas=[0.9,0.95]", "+attn.tiles.dq=64x32", "+data.mine=1"]
    words += ["+hydra.job.env_set.A=1", "++trainer.max_steps=5", "++quant.skip=[head]", "+data.mixup.prob=0.5"]
    command_line.check_added(words, CONF)
    command_line.check_added(["--config-dir", "mine", "+recipe=mine"], CONF)


def test_run__interrupted_single_run_message(monkeypatch, capsys):
    """Unlike a sweep's, its command alone would start anew."""

    def main():
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", ["train.py"])
    assert command_line.run(main, CONF) == EXIT_INTERRUPTED
    assert capsys.readouterr().out == "interrupted; resume=auto goes on from the newest checkpoint, if any\n"
