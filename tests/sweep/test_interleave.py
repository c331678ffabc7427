"""Which sweeps are timed in rounds, and why others are not."""

import json

import pytest

from vitkernels.sweep import interleave

ROUND = {"turns": [], "machine": [], "disturbed": []}
LOCAL, SLURM = "hydra._internal.BasicLauncher", "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Return time(*changes, **arguments): a sweep of one variant per change of the settings, and its record."""
    timed = []

    def in_rounds(variants, rounds, environment, earlier, keep):
        timed.append(([variant.name for variant in variants], rounds))
        time.earlier = len(earlier["rounds"]), earlier["failed"]
        record = {"rounds": [*earlier["rounds"], ROUND], "failed": dict(earlier["failed"]), "seconds": 1.0}
        if time.fails_after is not None:
            keep({"rounds": [ROUND] * time.fails_after, "failed": {"v2": "its process ended"}, "seconds": 1.0})
            raise KeyboardInterrupt
        return record

    monkeypatch.setattr(interleave, "time_in_rounds", in_rounds)

    def time(*changes, rounds="auto", launcher=LOCAL, **differs):
        rows = []
        for number, change in enumerate(changes):
            (tmp_path / f"v{number}").mkdir(exist_ok=True)
            job = {"circumstances": {"attn": {"name": "native"}, "code": "1", "versions": {}, "tuned": None} | change}
            (tmp_path / f"v{number}/job.json").write_text(json.dumps(job))
            row = {"variant": f"v{number}", "status": "done", "step_time_ms": {"median": 1.0, "n": 30}}
            row |= {"interpreted": [], "devices": 1, "device": "X", "runtime": "cpu", "repeats": None, "model": "vit"}
            row |= {"flops_per_image": 1.0, "precision": "fp32", "finished": "now", "folder": f"v{number}"}
            rows.append(row | (differs.get(f"v{number}") or {}))
        record = interleave.time_variants(tmp_path, rows, rounds, launcher, {})
        assert json.loads((tmp_path / "rounds.json").read_text()) == record
        return record

    time.timed, time.earlier, time.fails_after = timed, None, None
    return time


SDPA = {"attn": {"name": "sdpa"}}


def test_time_variants__auto_runs_two_rounds_more_than_an_interval_needs(sweep):
    assert sweep({}, SDPA)["reason"] is None
    assert sweep.timed == [(["v0", "v1"], 8)]


def test_time_variants__runs_the_configured_number_of_rounds(sweep):
    sweep({}, SDPA, SDPA, rounds=12)
    assert sweep.timed == [(["v0", "v1", "v2"], 12)]


def test_time_variants__reuses_the_rounds_of_the_same_runs(sweep):
    first = sweep({}, SDPA)
    assert sweep({}, SDPA) == first and len(sweep.timed) == 1
    sweep({}, SDPA, v1={"finished": "later"})
    assert len(sweep.timed) == 2


def test_time_variants__continues_after_the_rounds_of_an_interrupted_sweep(sweep, tmp_path):
    variants = {}, SDPA, SDPA, {"attn": {"name": "x"}}
    unfit = {"v3": {"runtime": "xla"}}
    sweep.fails_after = 3
    with pytest.raises(KeyboardInterrupt):
        sweep(*variants, **unfit)
    assert json.loads((tmp_path / "rounds.json").read_text())["rounds"] == [ROUND] * 3
    sweep.fails_after = None
    record = sweep(*variants, **unfit)
    assert sweep.earlier == (3, {"v2": "its process ended"}) and len(record["rounds"]) == 4
    assert record["failed"].keys() == {"v2", "v3"} and "is_interrupted" not in record
    assert sweep(*variants, **unfit) == record and len(sweep.timed) == 2
    sweep.fails_after = 1
    with pytest.raises(KeyboardInterrupt):
        sweep(*variants, v1={"finished": "later"}, **unfit)
    assert sweep.earlier[0] == 0  # other runs


@pytest.mark.parametrize(
    ("changes", "arguments", "said"),
    [
        (({}, SDPA), {"rounds": None}, "sweep.rounds=null"),
        (({}, SDPA), {"launcher": SLURM}, "cluster"),
        (({},), {}, "no other one can"),
        (({}, SDPA), {"v0": {"status": "failed"}}, "no other one can"),
        (({}, SDPA), {"v1": {"runtime": "xla"}}, "no other one can"),
        (({"optim": {"lr": 0.1}}, {"optim": {"lr": 1.0}}), {}, "do not change a step's time"),
        (({}, *[SDPA] * 8), {}, "up to 8 variants"),
    ],
)
def test_time_variants__says_why_no_rounds_ran(sweep, changes, arguments, said):
    record = sweep(*changes, **arguments)
    assert record["rounds"] == [] and said in record["reason"] and not sweep.timed


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ({"interpreted": ["Triton's interpreter"]}, "interpreted"),
        ({"devices": 2}, "2 devices"),
        ({"runtime": "xla"}, "a TPU belongs to one process"),
        ({"model": "other"}, "the model is other"),
        ({"step_time_ms": None}, "an evaluation has no steps"),
    ],
)
def test_time_variants__skips_incomparable_variants(sweep, differs, said):
    record = sweep({}, SDPA, SDPA, v1=differs)
    assert sweep.timed[0][0] == ["v0", "v2"] and said in record["failed"]["v1"]
