"""Job slots on one machine: how many run at once, which GPU each gets, and the shared compiler caches."""

import os
import threading

import pytest
from expecting import error

from vitkernels.sweep import slots


@pytest.fixture(autouse=True)
def isolated(monkeypatch, tmp_path):
    monkeypatch.setattr(slots.tempfile, "gettempdir", lambda: str(tmp_path))
    for name in ("SUBMITIT_EXECUTOR", "CUDA_VISIBLE_DEVICES", slots._SWEEP_GPUS, *slots._CACHES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(slots._SWEEP_GPUS, "")


def environment_of_job(limit, patience_s=60):
    """Return the environment variables that a job gets, or None if it still waits for a slot after `patience_s`."""
    got = []

    def job():
        with slots.slot(limit) as environment:
            got.append(environment)

    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    thread.join(patience_s)
    return got[0] if got else None


def waits(limit):
    return environment_of_job(limit, patience_s=0.5) is None


def test_slot__one_job_per_gpu(monkeypatch):
    monkeypatch.setenv(slots._SWEEP_GPUS, "2,5")
    with slots.slot("gpus") as first, slots.slot("gpus") as second:
        assert [first, second] == [{"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "5"}]
        assert waits("gpus")
    assert environment_of_job("gpus")["CUDA_VISIBLE_DEVICES"] in (
        "2",
        "5",
    )  # the waiting job may hold the other one now


def test_slot__limits_concurrent_jobs():
    with slots.slot(2), slots.slot(2):
        assert waits(2) and environment_of_job(3) == {} and environment_of_job(None) == {}
    with slots.slot("gpus"):  # no GPUs: one job at a time
        assert waits("gpus")


def test_slot__restores_gpus_hidden_by_submitit(monkeypatch):
    """submitit's local executor sets CUDA_VISIBLE_DEVICES="" and starts every job at once."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    slots.remember_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    assert environment_of_job(None) == {"CUDA_VISIBLE_DEVICES": "0,3"}
    with slots.slot("auto") as first, slots.slot("auto") as second:
        assert [first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]] == ["0", "3"]
        assert waits("auto")


def test_slot__auto_sets_no_limit_for_other_launchers():
    with slots.slot("auto"), slots.slot("auto") as environment:
        assert environment == {}


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "all"])
def test_check__rejects_invalid_limits(value):
    with error("sweep.slots", slots=value):
        slots.check(value)


def test_shared_caches__keep_variables_already_set(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    caches = slots.shared_caches(str(tmp_path))
    assert caches == {
        "TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/inductor",
        "JAX_COMPILATION_CACHE_DIR": f"{tmp_path}/jax",
    }
    assert slots.shared_caches(None) == {}
    assert slots.shared_caches("~/x")["TORCHINDUCTOR_CACHE_DIR"] == os.path.expanduser("~/x/inductor")


def test_shared_caches__none_without_a_home_folder(monkeypatch, caplog):
    def homeless(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.expanduser", homeless)
    assert slots.shared_caches("~/.cache/vitkernels") == {} and "home folder" in caplog.text
