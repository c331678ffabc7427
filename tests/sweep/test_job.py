"""Sweeps: where they go, what their table says, and what a command line's mistakes are answered with."""

import os
from pathlib import Path

import pytest

from vitkernels.cli import command_line
from vitkernels.errors import UsageError
from vitkernels.sweep import job as sweep
from vitkernels.sweep.job import _reason
from vitkernels.training import run_dir
from vitkernels.training.signals import EXIT_INTERRUPTED

CONF = str(Path(__file__).resolve().parents[2] / "conf")


def test_single_runs_are_left_alone():
    argv = ["train.py", "attn=sdpa"]
    assert sweep.arguments(argv) == argv


def test_the_same_sweep_gets_the_same_folder_and_jobs_are_named_by_what_varies():
    argv = ["train.py", "-m", "attn=native,sdpa", "data=fake", "trainer.max_steps=40"]
    named = sweep.arguments(argv)
    assert named == sweep.arguments(argv)
    assert named[:2] + named[4:] == argv
    assert named[2] == "hydra.job.config.override_dirname.exclude_keys=[data,trainer.max_steps]"
    assert named[3].startswith("hydra.sweep.dir=runs/sweeps/attn-")
    assert sweep.arguments([*argv, "seed=1"])[3] != named[3]


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_the_flag_may_stand_anywhere(flag):
    first, last = sweep.arguments(["train.py", "-m", "a=1,2"]), sweep.arguments(["train.py", "a=1,2", flag])
    assert first == last and first[1] == "-m" and first[-1] == "a=1,2"


def test_jobs_of_a_sweeper_that_brings_its_own_parameters_are_named_by_them():
    named = sweep.arguments(["train.py", "-m", "hydra/sweeper=optuna_lr_and_tiles", "attn=triton_flash"])
    assert "hydra.job.config.override_dirname.exclude_keys=[hydra/sweeper,attn]" in named


def test_a_sweep_for_slurm_without_slurm_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    argv = ["train.py", "-m", "hydra/launcher=slurm", "attn=native,sdpa"]
    with pytest.raises(UsageError, match="srun is not on the PATH here"):
        sweep.arguments(argv)
    monkeypatch.setattr("sys.argv", argv)
    assert command_line.run(None, CONF) == 2
    assert capsys.readouterr().out.startswith("error: hydra/launcher=slurm needs Slurm's srun")
    (tmp_path / "srun").touch(0o755)
    assert set(argv) < set(sweep.arguments(argv))


@pytest.mark.parametrize(("words", "setting"), [([], "hydra.run.dir"), (["-m", "seed=0,1"], "hydra.sweep.dir")])
def test_a_folder_that_cannot_be_made_is_told_in_one_line(words, setting, monkeypatch, capsys):
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


def test_an_own_folder_is_kept():
    named = sweep.arguments(["train.py", "-m", "attn=native,sdpa", "hydra.sweep.dir=here"])
    assert not any(word.startswith("hydra.sweep.dir=runs") for word in named)


def test_a_process_that_was_killed_is_said_to_be(tmp_path):
    assert _reason(tmp_path, -11, "step 3\nFatal\n") == "killed by SIGSEGV; its last line: Fatal"
    assert _reason(tmp_path, 3, "") == "exit code 3"


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
def test_command_line_mistakes(override, message):
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    with initialize_config_dir(CONF, version_base="1.3"), pytest.raises(HydraException) as error:
        compose("config", overrides=[override])
    assert message in command_line.explain(error.value, CONF)


def test_plus_is_not_recommended_where_nothing_takes_it():
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
def test_paths_need_no_quotes(value, meant):
    override = command_line._parsed(command_line.readable(f"data.root={value}"))
    assert override.value() == meant and not override.is_sweep_override()


@pytest.mark.parametrize(
    "value", ["~/a,~/b", "tag(log, interval(1e-5, 1e-2))", "choice(a,b", "{a: 1", "[0.5", '"a b', "a,b", "1e-3", "a b"]
)
def test_what_hydra_can_read_or_may_be_a_slip_is_left_alone(value):
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
def test_what_nothing_reads_cannot_be_added(word, message):
    with pytest.raises(UsageError, match=message):
        command_line.check_added([word], CONF)


def test_what_something_reads_can_be_added():
    words = ["+model.kwargs.depth=2", "+optim.kwargs.betas=[0.9,0.95]", "+attn.tiles.dq=64x32", "+data.mine=1"]
    words += ["+hydra.job.env_set.A=1", "++trainer.max_steps=5", "++quant.skip=[head]", "+data.mixup.prob=0.5"]
    command_line.check_added(words, CONF)
    command_line.check_added(["--config-dir", "mine", "+recipe=mine"], CONF)


def test_a_single_run_that_is_interrupted_says_how_to_go_on(monkeypatch, capsys):
    """Unlike a sweep's, its command alone would start anew."""

    def main():
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", ["train.py"])
    assert command_line.run(main, CONF) == EXIT_INTERRUPTED
    assert capsys.readouterr().out == "interrupted; resume=auto goes on from the newest checkpoint, if any\n"


@pytest.mark.parametrize(
    "path",
    ["attn=sdpa/checkpoints", "a,b", "of (mine)", 'a "b"', "back\\slash", 'at \\"one\\\\"', "at the end\\", "auto"],
)
def test_any_path_reaches_a_job_as_it_is(path):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    (override,) = OverridesParser.create().parse_overrides([f"resume={sweep.quoted(path)}"])
    assert override.value() == path and not override.is_sweep_override()


def test_an_evaluation_is_done_until_its_settings_or_its_weights_change(tmp_path, settings):
    assert run_dir.find_done(tmp_path, settings("mode=eval")) is None
    weights = tmp_path / "weights"
    weights.mkdir()
    cfg = settings("mode=eval", f"checkpoint={weights}")
    assert run_dir.find_done(tmp_path, cfg) is None
    run_dir.write_json(tmp_path / "eval.json", {"top1": 90.0, "settings": run_dir.identity(cfg)})
    assert run_dir.find_done(tmp_path, cfg) == tmp_path
    assert run_dir.find_done(tmp_path, settings("mode=eval", f"checkpoint={weights}", "quant=w8a8")) is None
    later = (tmp_path / "eval.json").stat().st_mtime + 5
    os.utime(weights, (later, later))
    assert run_dir.find_done(tmp_path, cfg) is None


@pytest.fixture
def done(tmp_path, settings):
    """A finished job's folder, as run_job and train.py leave it."""
    folder, cfg = tmp_path / "attn=sdpa", settings("attn=sdpa")
    run_dir.write_json(folder / "config.json", run_dir.identity(cfg))
    run_dir.write_json(folder / "summary.json", {"status": "done", "git_commit": "abc"})
    run_dir.write_json(folder / "job.json", {"status": "done", "circumstances": run_dir.circumstances(cfg)})
    (folder / "model.safetensors").write_text("of a long training")
    (folder / "output.log").write_text("said")
    return folder


def is_measured(folder, cfg) -> bool:
    return sweep._is_measured(folder, cfg, "attn=sdpa", run_dir.circumstances(cfg))


def test_a_job_that_is_done_is_not_run_again(done, settings, caplog):
    caplog.set_level("INFO")
    assert is_measured(done, settings("attn=sdpa", "resume=auto", "sweep.objective=train_loss"))
    assert "done before, skipped (at commit abc;" in caplog.text and (done / "summary.json").exists()


@pytest.mark.parametrize(
    "changed",
    ["data.num_workers=2", "trainer.log_every=1", "parallel.send=nccl", "checkpoints.every_epochs=2", "sweep.slots=2"],
)
def test_a_job_is_measured_again_when_what_may_change_its_step_time_has_changed(changed, done, settings, caplog):
    """... for which resume=auto would not train it again: it is the same training."""
    caplog.set_level("INFO")
    cfg = settings("attn=sdpa", changed)
    assert run_dir.find_done(done, cfg) == done
    assert not is_measured(done, cfg)
    assert f"measured again: {changed.split('=')[0]} is " in caplog.text
    assert run_dir.find_done(done, cfg) is None  # the job's own process will find nothing done


@pytest.mark.parametrize("what", ["code_hash", "versions"])
def test_an_edited_kernel_is_measured_again_and_the_earlier_run_kept(what, done, settings, monkeypatch):
    cfg = settings("attn=sdpa")
    for number in range(2):  # the second in place of the first
        run_dir.write_json(done / "summary.json", {"status": "done"})
        (done / "model.safetensors").write_text(f"training {number}")
        monkeypatch.setattr(run_dir, what, lambda: "another state")
        assert not is_measured(done, cfg)
        assert (done / "before/model.safetensors").read_text() == f"training {number}"
        assert {path.name for path in done.iterdir()} == {"before", "job.json", "output.log"}
        run_dir.write_json(done / "config.json", run_dir.identity(cfg))
    run_dir.write_json(done / "summary.json", {"status": "done"})
    run_dir.write_json(done / "job.json", {"circumstances": run_dir.circumstances(cfg)})
    assert is_measured(done, cfg)


def test_a_job_of_unknown_code_is_measured_again(done, settings):
    run_dir.write_json(done / "job.json", {"status": "done"})
    assert not is_measured(done, settings("attn=sdpa"))


def test_a_long_training_is_repeated_on_demand_alone(done, settings, monkeypatch, caplog):
    caplog.set_level("INFO")
    run_dir.write_json(done / "summary.json", {"status": "done", "git_commit": "abc", "seconds": 3600.0})
    monkeypatch.setattr(run_dir, "code_hash", lambda: "another state")
    assert is_measured(done, settings("attn=sdpa"))
    assert "took too long to be repeated unasked, though code is " in caplog.text
    assert (done / "model.safetensors").exists()
    assert not is_measured(done, settings("attn=sdpa", "sweep.rerun=true"))


def test_rerun_leaves_nothing_of_the_run_before(done, settings):
    assert not is_measured(done, settings("attn=sdpa", "sweep.rerun=true"))
    assert [path.name for path in done.iterdir()] == ["output.log"]


def test_an_evaluation_that_is_made_again_moves_nothing_of_the_run_beside_it(done, settings):
    cfg = settings("mode=eval", f'checkpoint="{done / "model.safetensors"}"')
    run_dir.write_json(done / "eval.json", {"top1": 90.0, "settings": run_dir.identity(cfg)})
    assert not is_measured(done, cfg)  # job.json is of the training
    assert (done / "model.safetensors").exists()
    assert not (done / "before").exists()
    assert run_dir.find_done(done, cfg) is None  # should it fail now


def test_a_tuned_table_is_one_of_the_circumstances(settings, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = run_dir.circumstances(settings())
    run_dir.write_json(tmp_path / "cache/vitkernels/measurements.json", {"X": []})
    assert [text.split(" is ")[0] for text in run_dir.differences(before, run_dir.circumstances(settings()))] == [
        "tuned"
    ]
