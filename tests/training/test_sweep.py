"""Sweeps: where they go, what their table says, and what a command line's mistakes are answered with."""

import json
import os
from pathlib import Path

import pytest

from vitkernels.bench import comparison
from vitkernels.errors import UsageError
from vitkernels.training import command_line, run_folder, sweep
from vitkernels.training.signals import EXIT_INTERRUPTED
from vitkernels.training.sweep import _reason

CONF = str(Path(__file__).resolve().parents[2] / "conf")


def test_single_runs_are_left_alone():
    argv = ["train.py", "attn=sdpa"]
    assert sweep.arguments(argv) == argv


def test_the_same_sweep_gets_the_same_folder_and_jobs_are_named_by_what_varies():
    argv = ["train.py", "-m", "attn=native,sdpa", "data=fake", "trainer.max_steps=40"]
    named = sweep.arguments(argv)
    assert named == sweep.arguments(argv)
    assert named[:5] == argv
    assert named[5] == "hydra.job.config.override_dirname.exclude_keys=[data,trainer.max_steps]"
    assert named[6].startswith("hydra.sweep.dir=runs/sweeps/attn-")
    assert sweep.arguments([*argv, "seed=1"])[-1] != named[6]


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
    assert sweep.arguments(argv)[:4] == argv


def test_an_own_folder_is_kept():
    named = sweep.arguments(["train.py", "-m", "attn=native,sdpa", "hydra.sweep.dir=here"])
    assert not any(word.startswith("hydra.sweep.dir=runs") for word in named)


def job(folder, num, variant, status="done", reason=None, **summary):
    path = folder / variant
    path.mkdir(parents=True)
    (path / "job.json").write_text(json.dumps({"num": num, "variant": variant, "status": status, "reason": reason}))
    if summary:
        times = {"median": summary.pop("median"), "p10": 9.0, "p90": 99.0, "mean": 10.0, "n": 5}
        defaults = {"images_per_s": 100.0, "mfu": None, "input_wait_ms": 0.5, "peak_memory_bytes": 2**30}
        content = {"status": "done", "device": "X", "step_time_ms": times, "train_loss": 1.0, **defaults, **summary}
        (path / "summary.json").write_text(json.dumps(content))


def test_the_verdict(tmp_path, capsys):
    job(tmp_path, 1, "attn=b", median=20.0, mfu=0.5)
    job(tmp_path, 0, "attn=a", median=40.0)
    job(tmp_path, 2, "attn=c", status="failed", reason="out of memory")
    rows = comparison.compare(tmp_path)
    assert [(r["variant"], r["ratio"]) for r in rows] == [("attn=a", 1.0), ("attn=b", 2.0), ("attn=c", None)]
    comparison.write(rows, tmp_path)
    comparison.show(rows, tmp_path)
    text = (tmp_path / "comparison.md").read_text()
    assert "| attn=b | 20.00 (9.00, 99.00) | 100.0 | 50.0 | 0.50 | 1024 | 1.0000 | 2.000 |" in text
    assert "**attn=c** failed: out of memory" in text
    assert "attn=c failed: out of memory" in capsys.readouterr().out
    assert json.loads((tmp_path / "comparison.json").read_text()) == rows
    assert (tmp_path / "comparison.png").stat().st_size > 5000


def test_the_verdict_on_evaluations(tmp_path, capsys):
    for num, (variant, top1) in enumerate({"quant=w8a8": 91.25, "quant=w4a16": 90.0}.items()):
        job(tmp_path, num, variant)
        card = {"quant": variant, "top1": top1, "loss": 0.5, "images_per_s": 200.0, "bytes": (8 - num) * 10**6}
        (tmp_path / variant / "eval.json").write_text(json.dumps(card))
    rows = comparison.compare(tmp_path)
    comparison.write(rows, tmp_path)
    comparison.show(rows, tmp_path)
    assert [row["val_top1"] for row in rows] == [91.25, 90.0]
    text = (tmp_path / "comparison.md").read_text()
    assert text.splitlines()[0] == "| variant | images/s | weights MB | val top-1 % |"
    assert "| quant=w4a16 | 200.0 | 7.00 | 90.00 |" in text and "ratio" not in text + capsys.readouterr().out


def test_an_evaluation_beside_a_run_hides_nothing_of_it(tmp_path):
    job(tmp_path, 0, "attn=a", median=40.0, val_top1=70.0)
    (tmp_path / "attn=a/eval.json").write_text(json.dumps({"top1": 60.0, "images_per_s": 1.0, "bytes": 1}))
    (row,) = comparison.compare(tmp_path)
    assert (row["ratio"], row["val_top1"], row["images_per_s"]) == (1.0, 70.0, 100.0)


def test_a_sweep_in_which_all_failed_still_has_its_table(tmp_path):
    job(tmp_path, 0, "attn=a", status="failed", reason="killed by SIGSEGV")
    rows = comparison.compare(tmp_path)
    comparison.write(rows, tmp_path)
    assert rows[0]["ratio"] is None and "killed by SIGSEGV" in (tmp_path / "comparison.md").read_text()


def test_a_sweep_whose_first_variant_failed_has_no_ratios_but_a_table(tmp_path):
    job(tmp_path, 0, "attn=a", status="failed", reason="out of memory")
    job(tmp_path, 1, "attn=b", median=20.0)
    rows = comparison.compare(tmp_path)
    comparison.write(rows, tmp_path)
    assert [row["ratio"] for row in rows] == [None, None]
    assert (tmp_path / "comparison.png").stat().st_size > 5000


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
    assert run_folder.find_done(tmp_path, settings("mode=eval")) is None
    weights = tmp_path / "weights"
    weights.mkdir()
    cfg = settings("mode=eval", f"checkpoint={weights}")
    assert run_folder.find_done(tmp_path, cfg) is None
    run_folder.write_json(tmp_path / "eval.json", {"top1": 90.0, "settings": run_folder.identity(cfg)})
    assert run_folder.find_done(tmp_path, cfg) == tmp_path
    assert run_folder.find_done(tmp_path, settings("mode=eval", f"checkpoint={weights}", "quant=w8a8")) is None
    later = (tmp_path / "eval.json").stat().st_mtime + 5
    os.utime(weights, (later, later))
    assert run_folder.find_done(tmp_path, cfg) is None
