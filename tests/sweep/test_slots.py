"""Slots for jobs on one machine, their GPUs, and the caches they share."""

import os
import threading

import pytest

from vitkernels.errors import UsageError
from vitkernels.sweep import slots as job_slots


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    monkeypatch.setattr(job_slots.tempfile, "gettempdir", lambda: str(tmp_path))
    for name in ("SUBMITIT_EXECUTOR", "CUDA_VISIBLE_DEVICES", job_slots._GPUS_OF_THE_SWEEP, *job_slots._CACHES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(job_slots._GPUS_OF_THE_SWEEP, "")


def sees(slots, patience=60):
    """The environment that a job gets; None when after so many seconds it still waits."""
    got = []

    def job():
        with job_slots.slot(slots) as environment:
            got.append(environment)

    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    thread.join(patience)
    return got[0] if got else None


def waits(slots):
    return sees(slots, patience=0.5) is None


def test_each_gpu_goes_to_one_job_at_a_time(monkeypatch):
    monkeypatch.setenv(job_slots._GPUS_OF_THE_SWEEP, "2,5")
    with job_slots.slot("gpus") as first, job_slots.slot("gpus") as second:
        assert [first, second] == [{"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "5"}]
        assert waits("gpus")
    assert sees("gpus")["CUDA_VISIBLE_DEVICES"] in ("2", "5")  # the job that waited may have the other at this moment


def test_a_number_of_jobs_at_once():
    with job_slots.slot(2), job_slots.slot(2):
        assert waits(2) and sees(3) == {} and sees(None) == {}
    with job_slots.slot("gpus"):  # without a GPU: one at a time
        assert waits("gpus")


def test_what_submitit_hides_is_given_back(monkeypatch):
    """Its local executor sets CUDA_VISIBLE_DEVICES="" and starts every job at once."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    job_slots.remember_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    assert sees(None) == {"CUDA_VISIBLE_DEVICES": "0,3"}
    with job_slots.slot("auto") as first, job_slots.slot("auto") as second:
        assert [first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]] == ["0", "3"]
        assert waits("auto")


def test_other_launchers_are_not_held_back():
    with job_slots.slot("auto"), job_slots.slot("auto") as environment:
        assert environment == {}


@pytest.mark.parametrize("slots", [0, -1, 1.5, True, "all"])
def test_wrong_values_are_named(slots):
    with pytest.raises(UsageError, match=r"sweep\.slots must be"):
        job_slots.check(slots)


def test_caches_are_shared_but_for_those_set_already(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    caches = job_slots.shared_caches(str(tmp_path))
    assert caches == {
        "TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/inductor",
        "JAX_COMPILATION_CACHE_DIR": f"{tmp_path}/jax",
    }
    assert job_slots.shared_caches(None) == {}
    assert job_slots.shared_caches("~/x")["TORCHINDUCTOR_CACHE_DIR"] == os.path.expanduser("~/x/inductor")


def test_a_user_without_a_home_shares_no_cache(monkeypatch, caplog):
    def homeless(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.expanduser", homeless)
    assert job_slots.shared_caches("~/.cache/vitkernels") == {} and "has no home folder" in caplog.text
