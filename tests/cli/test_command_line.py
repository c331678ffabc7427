"""Running train.py's main function: backends without YAML, exit statuses, errors phrased for the command line."""

from pathlib import Path

import pytest
from expecting import error
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException

from vitkernels.cli import command_line, wording
from vitkernels.cli.known_settings import OPEN
from vitkernels.cli.wording import explained, in_settings, no_setting, setting_of
from vitkernels.config.compose import compose as config_of
from vitkernels.config.schema import Config
from vitkernels.config.setting import groups_of, settings_of
from vitkernels.errors import EXIT_INTERRUPTED, UsageError, unknown_name

CONF = str(Path(__file__).resolve().parents[2] / "conf")


@pytest.mark.parametrize(("words", "setting"), [([], "hydra.run.dir"), (["-m", "seed=0,1"], "hydra.sweep.dir")])
def test_run__results_folder_cannot_be_created(words, setting, monkeypatch, capsys):
    def main():  # Hydra makes the folder before it calls ours
        raise OSError(30, "Read-only file system", "/mnt/runs")

    monkeypatch.setattr("sys.argv", ["train.py", *words])
    monkeypatch.setattr(command_line.hydra, "main", lambda **_: lambda job: main)
    assert command_line.run(main, CONF) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert not printed.out
    assert line.startswith("error: ") and "[Errno 30]" in line and line.endswith(f"{setting}=FOLDER")


def test_run__interrupted_single_run(monkeypatch, capsys):
    """Unlike a sweep, repeating its command alone would start from scratch."""

    def main():
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", ["train.py"])
    assert command_line.run(main, CONF) == EXIT_INTERRUPTED
    assert "resume=auto" in capsys.readouterr().out


def test_run__library_error_names_the_setting(monkeypatch, capsys):
    def main():
        raise unknown_name("optimizer", "adamww", ["adamw"])

    monkeypatch.setattr("sys.argv", ["train.py"])
    assert command_line.run(main, CONF) == 2
    line = capsys.readouterr().err
    assert "'adamw'" in line and line.endswith("Setting: optim.opt=...\n")


def test_run__unknown_option_is_one_line(monkeypatch, capsys):
    """Hydra would print eight lines of usage first."""
    monkeypatch.setattr("sys.argv", ["train.py", "--resume", "runs/a"])
    assert command_line.run(lambda: None, CONF) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ") and "resume=VALUE" in line and not printed.out


def test_run__current_folder_is_importable(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["somewhere"])
    assert command_line.run(lambda: None, CONF) == 0
    assert command_line.sys.path == ["somewhere", str(tmp_path)]


@pytest.fixture
def attn_mine(monkeypatch):
    """Register an attention backend "mine" without a YAML file, like one from another package."""
    names = command_line.attention.names()
    monkeypatch.setattr(command_line.attention, "names", lambda: (*names, "mine"))
    repo = ConfigStore.instance().repo
    monkeypatch.setitem(repo, "attn", dict(repo.get("attn", {})))
    command_line.add_backends(CONF)


def test_backend_without_yaml__can_be_chosen_and_swept(attn_mine, settings):
    assert settings("attn=mine").attn == {"name": "mine"}
    assert settings("attn=mine", "+attn.tile=64").attn == {"name": "mine", "tile": 64}
    assert settings("attn=sdpa").attn.name == "sdpa"  # YAML files stay


def test_backend_without_yaml__is_among_the_choices(attn_mine):
    with error("cli.option", group="attn", name="mien"):
        raise explanation("attn=mien")
    assert "mine" in str(explanation("attn=mien"))


def explanation(*overrides: str) -> UsageError:
    with initialize_config_dir(CONF, version_base="1.3"), pytest.raises(HydraException) as caught:
        compose("config", overrides=list(overrides))
    return explained(caught.value, CONF, overrides)


@pytest.mark.parametrize(
    ("override", "code", "fields", "fix"),
    [
        ("attn=nosuch", "option", {"group": "attn", "name": "nosuch"}, "attn=NAME"),
        ("trainer.max_step=3", "setting", {"setting": "trainer.max_step"}, "Did you mean trainer.max_steps"),
        ("+model.kwargs=3", "setting", {"setting": "model.kwargs"}, "model.kwargs=... without +"),
        ("attn.block=3", "setting", {"setting": "attn.block"}, "+attn.block=..."),
        ("checkpoint=a/b=c/best", "syntax", {"word": "checkpoint=a/b=c/best"}, "'checkpoint=\"a/b=c/best\"'"),
        ("nonsense", "syntax", {"word": "nonsense"}, "attn=sdpa"),
        ("data.root=~/a,b", "syntax", {"word": "data.root=~/a,b"}, "'data.root=\"~/a,b\"'"),
        ("data.scale=[0.5", "syntax", {}, "bracket"),
        ("attn=native,sdpa", "several_values", {"setting": "attn", "value": "native,sdpa"}, "'attn=\"native,sdpa\"'"),
        ("optim.lr=interval(1e-4, 1e-2)", "several_values", {"setting": "optim.lr"}, "-m ..."),
        (
            "data.root=/tmp",
            "setting",
            {"owners": ["data=imagefolder", "data=shards", "data=table"]},
            "data=imagefolder",
        ),
        ("lr=0.1", "setting", {"setting": "lr"}, "Did you mean optim.lr"),
        ("trainer.epochs=3", "setting", {"setting": "trainer.epochs"}, "Did you mean trainer.max_epochs? "),
        ("optim.decay=0", "setting", {"setting": "optim.decay"}, "optim.weight_decay or optim.layer_decay"),
        ("optim.kwargs={betas: 3}", "setting", {"setting": "optim.kwargs"}, "+optim.kwargs.NAME="),
        ("model.kwargs.depth=2", "setting", {"setting": "model.kwargs.depth"}, "+model.kwargs.depth="),
    ],
)
def test_explained__names_value_and_fix(override, code, fields, fix):
    with error(f"cli.{code}", **fields) as caught:
        raise explanation(override)
    assert fix in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["model.depth=3"], "+model.kwargs.depth=3"),
        (["model.nosuch=3"], "--help"),
        (
            ["model=timm", "model.name=swin_tiny_patch4_window7_224", "model.window_size=8"],
            "+model.kwargs.window_size=8",
        ),
        (["model=timm", "model.name=swin_tiny_patch4_window7_224", "model.depth=3"], "--help"),
        (["model.num_classes=3"], "the data set determines"),
    ],
)
def test_explained__model_setting_that_is_an_argument_of_timm(overrides, fix):
    with error("cli.setting", setting=overrides[-1].partition("=")[0]) as caught:
        raise explanation(*overrides)
    assert fix in str(caught.value)


def test_explained__unknown_option_message():
    assert str(explanation("schedule=cosin")) == (
        "unknown schedule 'cosin'; known: constant, cosine. Did you mean 'cosine'? Choose with schedule=NAME."
    )


@pytest.mark.parametrize("name", ["vit_medium_patch16_reg4_gap_256", "vit_base_patch16_224.augreg_in21k"])
def test_explained__model_of_timm_without_a_file(name, settings):
    """Its message offers timm's model, and no similar file."""
    words = ["model=timm", f"model.name={name}"]
    raised = explanation(f"model={name}")
    assert (raised.code, raised.fields["group"], raised.fields["name"]) == ("cli.option", "model", name)
    assert str(raised).endswith(f"choose it with {' '.join(words)}") and "Did you mean" not in str(raised)
    assert settings(*words).model.name == name
    with error("unknown_name", name=name) as caught:
        config_of([f"model={name}"])
    assert in_settings(caught.value) == str(raised)


def test_explained__model_that_timm_does_not_know():
    assert "model.name" not in str(explanation("model=vit_medium_patch16_reg4_gap_257"))


def test_no_setting__suggests_plus_only_for_open_groups():
    assert "+" not in str(no_setting("trainer.max_step", {"trainer.max_steps": []}))
    for name in OPEN:
        assert f"+{name}x=" in str(no_setting(f"{name}x", {}))


@pytest.mark.parametrize(
    ("raised", "setting"),
    [
        (unknown_name("attention backend", "sdp", ["sdpa"]), "attn"),
        (unknown_name("mlp backend", "x", ["auto"]), "ops.mlp"),
        (unknown_name("parallel send", "x", ["auto"]), "parallel.send"),
        (UsageError("no", code="registry.unsupported", op="attention"), "attn"),
        (UsageError("no", code="registry.unsupported", op="linear"), "ops.linear"),
        (UsageError("no", code="parallel.setting", setting="reshard"), "parallel.reshard"),
        (UsageError("no", code="data.value", setting="hflip"), "data.hflip"),
        (UsageError("no", code="models.op_option", option="keep_activation"), "ops.keep_activation"),
        (UsageError("no", code="plan.accum_steps"), "trainer.accum_steps"),
        (UsageError("no", code="config.range", setting="seed"), None),
        (UsageError("no", code="data.one_class"), None),
    ],
)
def test_in_settings__adds_the_setting(raised, setting):
    assert setting_of(raised) == setting
    assert in_settings(raised).endswith(f"Setting: {setting}=..." if setting else str(raised))


def test_in_settings__knows_codes_and_settings_that_exist():
    source = "".join(path.read_text() for path in (Path(CONF).parent / "vitkernels").rglob("*.py"))
    assert [code for code in wording._SETTING_OF_CODE if f'code="{code}"' not in source] == []
    groups = groups_of(Config)
    known = {*groups, *(each.name for each in settings_of(Config))}
    known |= {f"{name}.{each.name}" for name, group in groups.items() for each in settings_of(group)}
    for setting in (*wording._SETTING_OF_CODE.values(), *wording._SETTING_OF_KIND.values()):
        assert setting.removesuffix(".NAME") in known or setting.startswith(("data.", "attn.")), setting


def test_in_settings__leaves_a_message_that_names_the_setting():
    raised = UsageError("attn=sdpa does not run here", code="attention.unsupported_model")
    assert in_settings(raised) == str(raised)
