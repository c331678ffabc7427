"""Weights & Biases and MLflow without a network: what a run leaves with each, and what their failures do."""

import sys
import time

import pytest
from expecting import error
from PIL import Image

from vitkernels.training.loggers import remote
from vitkernels.training.metrics import StepRecord, add_times

SETTINGS = {"optim": {"lr": 0.1, "kwargs": {}}, "seed": 3}


def log_run(logger, folder) -> None:
    records = [StepRecord(step, 2.0 - step / 10, 1.0, 0.1) for step in (1, 2, 3)]
    add_times(records, [30.0, 31.0])
    logger.steps(records)
    logger.scalars(3, {"train/loss": 1.8, "time/mfu": None})
    logger.window(3, "", "")
    logger.evaluation(3, {"val_top1": 50.0})
    Image.new("RGB", (4, 4)).save(folder / "mistakes.png")
    logger.picture(3, "evaluation/mistakes", folder / "mistakes.png")
    logger.hparams({}, {"val_top1": 50.0, "loss": 1.7})
    logger.close()
    logger.close()


def test_add_times__last_records_are_the_timed_ones():
    records = [StepRecord(step, 1.0, 1.0, 0.1) for step in (1, 2, 3)]
    add_times(records, [30.0, 31.0])
    assert [record.step_ms for record in records] == [None, 30.0, 31.0]
    assert records[0].curves() == {"1_loss": 1.0, "3_lr": 0.1} and records[2].curves()["4_step_ms"] == 31.0
    assert "step_ms" not in records[2].as_dict()  # metrics.jsonl holds what two equal runs have in common


@pytest.mark.filterwarnings("ignore")  # of wandb's and mlflow's own code
def test_mlflow__file_store_holds_points_settings_and_results(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # so that it is unset again
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the second one resumes the first
        log_run(remote.create("mlflow", tmp_path, "vits", SETTINGS), tmp_path)
    client = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("vits").experiment_id])
    assert run.data.params == {"optim.lr": "0.1", "optim.kwargs": "{}", "seed": "3"}
    assert run.data.metrics["val_top1"] == 50.0 and run.data.metrics["result/loss"] == 1.7
    points = client.get_metric_history(run.info.run_id, "loss")
    assert sorted({(point.step, point.value) for point in points}) == [(1, 1.9), (2, 1.8), (3, 1.7)]
    assert run.info.status == "FINISHED"
    assert [file.path for file in client.list_artifacts(run.info.run_id, "evaluation")] == ["evaluation/mistakes.png"]


@pytest.mark.filterwarnings("ignore")
def test_mlflow__points_wait_for_a_server_that_does_not_answer(tmp_path, monkeypatch, caplog):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    logger = remote.create("mlflow", tmp_path, "vits", {})
    send, answers = mlflow.MlflowClient.log_batch, False

    def log_batch(*args, **keywords):
        if not answers:
            raise ConnectionError("no route")
        send(*args, **keywords)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", log_batch)
    monkeypatch.setattr(remote, "_MOST_WAITING", 2)
    for step in (1, 2, 3):
        logger.evaluation(step, {"val_top1": 10.0 * step})
        logger.window(step, "", "")
    answers = True
    logger.window(4, "", "")
    client = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("vits").experiment_id])
    points = client.get_metric_history(run.info.run_id, "val_top1")
    assert [(point.step, point.value) for point in points] == [(2, 20.0), (3, 30.0)]
    assert caplog.text.count("no route; training continues, and sends its points when") == 1
    answers = False
    logger.evaluation(5, {"val_top1": 50.0})
    logger.close()
    assert "mlflow: points not sent: 2" in caplog.text  # of steps 1 and 5


@pytest.mark.filterwarnings("ignore")
def test_mlflow__invalid_points_do_not_hold_up_later_ones(tmp_path, monkeypatch, caplog):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    logger = remote.create("mlflow", tmp_path, "vits", {})
    logger.evaluation(1, {"no/../name": 1.0})
    logger.window(1, "", "")
    logger.evaluation(2, {"val_top1": 20.0})
    logger.close()
    client = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("vits").experiment_id])
    assert run.data.metrics == {"val_top1": 20.0} and "mlflow: points not sent: 1" in caplog.text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb__offline_run_is_written_into_the_folder(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log_run(remote.create("wandb", tmp_path, "vits", SETTINGS), tmp_path)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    end = time.monotonic() + 60
    while b"step_ms" not in file.read_bytes() and time.monotonic() < end:  # wandb's own process writes it
        time.sleep(0.1)
    content = file.read_bytes()
    assert list(tmp_path.glob("wandb/offline-run-*/files/media/images/evaluation/mistakes*.png"))
    assert b"step_ms" in content and b"val_top1" in content and b"vits" in content
    assert (tmp_path / "wandb_run_id").read_text().strip() in file.name


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_create__missing_package_names_the_extra(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with error("logger.missing_package", package=name) as caught:
        remote.create(name, tmp_path, "vits", SETTINGS)
    assert f"vitkernels[{name}]" in str(caught.value)


def test_create__unknown_name(tmp_path):
    with error("unknown_name", name="tensorboards"):
        remote.create("tensorboards", tmp_path, "vits", SETTINGS)


def test_remote_logger__failing_service_is_logged_once(tmp_path, caplog):
    class Broken(remote.RemoteLogger):
        def send(self, step, values):
            raise ConnectionError("no route")

    log_run(Broken("mine"), tmp_path)
    assert caplog.text.count("mine: no route; training continues") == 1
