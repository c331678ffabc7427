"""Jobs of a sweep: their folders, when a finished job is skipped, and how a failure is described."""

import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from expecting import error
from omegaconf import OmegaConf

from vitkernels.cli import command_line
from vitkernels.sweep import job
from vitkernels.training import run_dir

CONF = str(Path(__file__).resolve().parents[2] / "conf")


def plain(config) -> dict:
    return OmegaConf.to_container(config, resolve=True)


def test_add_sweep_folder__single_run_unchanged():
    argv = ["train.py", "attn=sdpa"]
    assert job.add_sweep_folder(argv) == argv


def test_add_sweep_folder__deterministic_and_named_by_swept_settings():
    argv = ["train.py", "-m", "attn=native,sdpa", "data=fake", "trainer.max_steps=40"]
    named = job.add_sweep_folder(argv)
    assert named == job.add_sweep_folder(argv)
    assert named[:2] + named[4:] == argv
    assert named[2] == "hydra.job.config.override_dirname.exclude_keys=[data,trainer.max_steps]"
    assert named[3].startswith("hydra.sweep.dir=runs/sweeps/attn-")
    assert job.add_sweep_folder([*argv, "seed=1"])[3] != named[3]


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_add_sweep_folder__multirun_flag_at_any_position(flag):
    first, last = job.add_sweep_folder(["train.py", "-m", "a=1,2"]), job.add_sweep_folder(["train.py", "a=1,2", flag])
    assert first == last and first[1] == "-m" and first[-1] == "a=1,2"


def test_add_sweep_folder__names_jobs_by_parameters_of_the_sweeper():
    named = job.add_sweep_folder(["train.py", "-m", "hydra/sweeper=optuna_lr_and_tiles", "attn=triton_flash"])
    assert "hydra.job.config.override_dirname.exclude_keys=[hydra/sweeper,attn]" in named


def test_add_sweep_folder__slurm_launcher_without_slurm(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    argv = ["train.py", "-m", "hydra/launcher=slurm", "attn=native,sdpa"]
    with error("sweep.no_slurm"):
        job.add_sweep_folder(argv)
    monkeypatch.setattr("sys.argv", argv)
    assert command_line.run(None, CONF) == 2
    assert capsys.readouterr().err.startswith("error: hydra/launcher=slurm needs Slurm's srun")
    (tmp_path / "srun").touch(0o755)
    assert set(argv) < set(job.add_sweep_folder(argv))


def test_add_sweep_folder__keeps_explicit_folder():
    named = job.add_sweep_folder(["train.py", "-m", "attn=native,sdpa", "hydra.sweep.dir=here"])
    assert not any(word.startswith("hydra.sweep.dir=runs") for word in named)


def test_failure_reason_message(tmp_path):
    assert job._failure_reason(tmp_path, -11, "step 3\nFatal\n") == "killed by SIGSEGV; last line of output: Fatal"
    assert job._failure_reason(tmp_path, 3, "") == "exit code 3"


@pytest.mark.parametrize(
    "path",
    ["attn=sdpa/checkpoints", "a,b", "of (mine)", 'a "b"', "back\\slash", 'at \\"one\\\\"', "at the end\\", "auto"],
)
def test_quoted__hydra_reads_the_path_back(path):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    (override,) = OverridesParser.create().parse_overrides([f"resume={job.quoted(path)}"])
    assert override.value() == path and not override.is_sweep_override()


def test_find_complete__evaluation_until_settings_or_weights_change(tmp_path, settings):
    assert run_dir.find_complete(tmp_path, plain(settings("mode=eval"))) is None
    weights = tmp_path / "weights"
    weights.mkdir()
    cfg = settings("mode=eval", f"checkpoint={weights}")
    assert run_dir.find_complete(tmp_path, plain(cfg)) is None
    run_dir.write_json(tmp_path / "eval.json", {"top1": 90.0, "settings": run_dir.identity(plain(cfg))})
    assert run_dir.find_complete(tmp_path, plain(cfg)) == tmp_path
    assert run_dir.find_complete(tmp_path, plain(settings("mode=eval", f"checkpoint={weights}", "quant=w8a8"))) is None
    later = (tmp_path / "eval.json").stat().st_mtime + 5
    os.utime(weights, (later, later))
    assert run_dir.find_complete(tmp_path, plain(cfg)) is None


@pytest.fixture
def done(tmp_path, settings):
    """Return the folder of a finished job, as run_job and train.py leave it."""
    folder, cfg = tmp_path / "attn=sdpa", settings("attn=sdpa")
    run_dir.write_json(folder / "config.json", run_dir.identity(plain(cfg)))
    run_dir.write_json(folder / "summary.json", {"status": "done", "git_commit": "abc"})
    run_dir.write_json(folder / "job.json", {"status": "done", "circumstances": run_dir.circumstances(plain(cfg))})
    (folder / "model.safetensors").write_text("of a long training")
    (folder / "output.log").write_text("said")
    return folder


def can_skip(folder, cfg) -> bool:
    return job._can_skip(folder, cfg, "attn=sdpa", run_dir.circumstances(plain(cfg)))


def test_can_skip__finished_job(done, settings, caplog):
    caplog.set_level("INFO")
    assert can_skip(done, settings("attn=sdpa", "resume=auto", "sweep.objective=train_loss"))
    assert "skipped, already done at commit abc;" in caplog.text and (done / "summary.json").exists()


@pytest.mark.parametrize(
    "changed",
    ["data.num_workers=2", "trainer.log_every=1", "parallel.send=nccl", "checkpoints.every_epochs=2", "sweep.slots=2"],
)
def test_can_skip__not_if_a_setting_that_affects_step_times_changed(changed, done, settings, caplog):
    """resume=auto, in contrast, would not repeat it: it is the same training."""
    caplog.set_level("INFO")
    cfg = settings("attn=sdpa", changed)
    assert run_dir.find_complete(done, plain(cfg)) == done
    assert not can_skip(done, cfg)
    assert "measuring again" in caplog.text and changed.split("=")[0] in caplog.text
    assert run_dir.find_complete(done, plain(cfg)) is None  # the job's own process finds nothing done


@pytest.mark.parametrize("what", ["code_hash", "versions"])
def test_can_skip__not_if_code_or_packages_changed_and_keeps_previous_run(what, done, settings, monkeypatch):
    cfg = settings("attn=sdpa")
    for number in range(2):  # the second run replaces the first in `before`
        run_dir.write_json(done / "summary.json", {"status": "done"})
        (done / "model.safetensors").write_text(f"training {number}")
        monkeypatch.setattr(run_dir, what, lambda: "another state")
        assert not can_skip(done, cfg)
        assert (done / "before/model.safetensors").read_text() == f"training {number}"
        assert {path.name for path in done.iterdir()} == {"before", "job.json", "output.log"}
        run_dir.write_json(done / "config.json", run_dir.identity(plain(cfg)))
    run_dir.write_json(done / "summary.json", {"status": "done"})
    run_dir.write_json(done / "job.json", {"circumstances": run_dir.circumstances(plain(cfg))})
    assert can_skip(done, cfg)


def test_can_skip__not_if_measured_code_is_unknown(done, settings):
    run_dir.write_json(done / "job.json", {"status": "done"})
    assert not can_skip(done, settings("attn=sdpa"))


def test_can_skip__long_run_repeats_only_on_rerun(done, settings, monkeypatch, caplog):
    caplog.set_level("INFO")
    run_dir.write_json(done / "summary.json", {"status": "done", "git_commit": "abc", "seconds": 3600.0})
    monkeypatch.setattr(run_dir, "code_hash", lambda: "another state")
    assert can_skip(done, settings("attn=sdpa"))
    assert "skipped" in caplog.text and "sweep.rerun=true" in caplog.text
    assert (done / "model.safetensors").exists()
    assert not can_skip(done, settings("attn=sdpa", "sweep.rerun=true"))


def test_can_skip__rerun_deletes_previous_results(done, settings):
    assert not can_skip(done, settings("attn=sdpa", "sweep.rerun=true"))
    assert [path.name for path in done.iterdir()] == ["output.log"]


def test_can_skip__repeated_evaluation_keeps_training_in_same_folder(done, settings):
    cfg = settings("mode=eval", f'checkpoint="{done / "model.safetensors"}"')
    run_dir.write_json(done / "eval.json", {"top1": 90.0, "settings": run_dir.identity(plain(cfg))})
    assert not can_skip(done, cfg)  # job.json belongs to the training
    assert (done / "model.safetensors").exists()
    assert not (done / "before").exists()
    assert run_dir.find_complete(done, plain(cfg)) is None  # in case the new evaluation fails


@pytest.fixture
def run_script(tmp_path, monkeypatch):
    """run_script(code) -> what _run_in_own_process returns for a job that runs this Python code."""

    def run(code: str):
        monkeypatch.setattr(job, "train_command", lambda: [sys.executable, "-c", code])
        monkeypatch.setattr(job, "_configuration_options", lambda: [])
        return job._run_in_own_process(tmp_path, OmegaConf.create({"resume": None}), [], {})

    return run


def failing_stdout(monkeypatch, error: Exception) -> None:
    def write(line):
        raise error

    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=SimpleNamespace(write=write), flush=lambda: None))


THREE_LINES = "for number in range(3): print('line', number, flush=True)"


def test_job__continues_if_the_terminal_is_gone(run_script, monkeypatch, tmp_path, caplog):
    """As with `python train.py -m ... | head`."""
    failing_stdout(monkeypatch, BrokenPipeError(errno.EPIPE, "Broken pipe"))
    assert run_script(THREE_LINES) == (0, "line 0\nline 1\nline 2\n", None)
    assert [record.getMessage() for record in caplog.records] == [
        "the job's output can no longer be written to the terminal: [Errno 32] Broken pipe; the job continues"
    ]


def test_job__continues_if_the_disk_is_full(run_script, monkeypatch, tmp_path, caplog, capsysbinary):
    class Full(io.BytesIO):
        def write(self, line):
            raise OSError(errno.ENOSPC, "No space left on device")

    def opened(path, mode, **options):
        return Full() if mode == "ab" else open(path, mode, **options)

    (tmp_path / "output.log").touch()
    monkeypatch.setattr(job, "open", opened, raising=False)
    assert run_script(THREE_LINES) == (0, "", None)
    assert capsysbinary.readouterr().out == b"line 0\nline 1\nline 2\n"
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "the job's output can no longer be written to output.log"
    ]


def test_job__ends_with_an_error_of_the_sweep(run_script, monkeypatch, tmp_path):
    failing_stdout(monkeypatch, ValueError("of another kind"))
    pid = tmp_path / "pid"
    with pytest.raises(ValueError, match="of another kind"):
        run_script(
            f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); print(1, flush=True); time.sleep(9)"
        )
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_job__gets_a_signal_that_arrives_as_it_starts(run_script, monkeypatch):
    start = subprocess.Popen

    def started(*args, **options):
        signal.raise_signal(signal.SIGTERM)
        return start(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", started)
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)  # without it, a missed signal would end pytest
    try:
        assert run_script("import time; time.sleep(5)") == (-signal.SIGTERM, "", signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_circumstances__include_tuning_table(settings, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = run_dir.circumstances(plain(settings()))
    run_dir.write_json(tmp_path / "cache/vitkernels/measurements.json", {"X": []})
    (difference,) = run_dir.differences(before, run_dir.circumstances(plain(settings())))
    assert difference.startswith("tuned ")


def test_verdict_table__moved_from_training():
    from vitkernels.training import sweep

    with pytest.warns(DeprecationWarning, match=r"vitkernels\.sweep\.job\.VerdictTable"):
        assert sweep.VerdictTable is job.VerdictTable
    with pytest.raises(AttributeError):
        sweep.anything_else  # noqa: B018
