"""Weights & Biases and MLflow: the curves, the settings and the results of a run."""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

from vitkernels.errors import UsageError, unknown_name
from vitkernels.training.loggers.base import NullLogger
from vitkernels.training.metrics import StepRecord

log = logging.getLogger(__name__)

_BATCH = 900  # metrics of a request; MLflow takes up to 1000
_MOST_WAITING = 500_000  # metrics kept for a server that does not answer: about 100 MB


def create(name: str, folder: Path, project: str, settings: dict[str, Any]) -> NullLogger:
    """Return the logger of that name: none, wandb or mlflow.

    Raises UsageError: "unknown_name", or "logger.missing_package" if its package is not installed.
    """
    if name == "none":
        return NullLogger()
    if name not in ("wandb", "mlflow"):
        raise unknown_name("logger", name, ["none", "wandb", "mlflow"])
    try:
        return WandbLogger(folder, project, settings) if name == "wandb" else MlflowLogger(folder, project, settings)
    except ImportError as error:
        message = f"logger {name!r} needs a package that is not installed ({error}): pip install 'vitkernels[{name}]'"
        raise UsageError(message, code="logger.missing_package", package=name) from error


class RemoteLogger(NullLogger):
    """Collect points under TensorBoard's names and send them; a failing service does not end training."""

    _consequence = "training continues without its points"

    def __init__(self, name: str):
        self._name, self._failing = name, False

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._failing:
                log.error("%s: %s; %s", self._name, error, self._consequence)
            self._failing = True

    def send(self, step: int, values: dict[str, float]) -> None:
        """Send the values of one step."""
        raise NotImplementedError

    def steps(self, records: list[StepRecord]) -> None:
        with self._tolerant():
            for record in records:
                self.send(record.step, {name.split("_", 1)[1]: value for name, value in record.curves().items()})

    def evaluation(self, step: int, figures: dict[str, float]) -> None:
        with self._tolerant():
            self.send(step, figures)

    def scalars(self, step: int, values: dict[str, float | None]) -> None:
        with self._tolerant():
            self.send(step, {name: value for name, value in values.items() if value is not None})


class WandbLogger(RemoteLogger):
    """One run of Weights & Biases; a resumed run continues it."""

    def __init__(self, folder: Path, project: str, settings: dict[str, Any]):
        import wandb

        super().__init__("wandb")
        identifier = folder / "wandb_run_id"
        known = identifier.read_text().strip() if identifier.exists() else None
        self._run = wandb.init(
            project=project, name=folder.name, dir=str(folder), config=settings, id=known,
            resume="allow" if known else None, reinit="create_new",
        )  # fmt: skip
        # Points of one step arrive at different times. A step axis of our own orders them; wandb's counter would not.
        self._run.define_metric("*", step_metric="step")
        identifier.write_text(f"{self._run.id}\n")
        self._closed = False

    def send(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def hparams(self, parameters: dict, results: dict) -> None:
        with self._tolerant():
            self._run.summary.update({f"result/{name}": value for name, value in results.items()})

    def picture(self, step: int, title: str, path: Path) -> None:
        import wandb

        with self._tolerant():
            self._run.log({"step": step, title: wandb.Image(str(path))})

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with self._tolerant():
                self._run.finish()


class MlflowLogger(RemoteLogger):
    """One run of MLflow; a resumed run continues it."""

    _consequence = "training continues, and sends its points when the service answers again"

    def __init__(self, folder: Path, project: str, settings: dict[str, Any]):
        # The extra has no database driver: without a server, figures go into files, which MLflow 3 must be allowed to
        # do.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException

        super().__init__("mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or Path("mlruns").absolute().as_uri()
        self._client, self._metric, self._exception = MlflowClient(uri), Metric, MlflowException
        self._waiting: list[Any] = []
        self._lost = 0
        identifier = folder / "mlflow_run_id"
        if identifier.exists():
            self._run = identifier.read_text().strip()
        else:
            found = self._client.get_experiment_by_name(project)
            experiment = self._client.create_experiment(project) if found is None else found.experiment_id
            self._run = self._client.create_run(experiment, run_name=folder.name).info.run_id
            identifier.write_text(f"{self._run}\n")
            flat = [Param(name, str(value)[:500]) for name, value in _flat(settings).items()]
            for start in range(0, len(flat), 100):
                self._client.log_batch(self._run, params=flat[start : start + 100])
        self._closed, self._complete = False, False

    def send(self, step: int, values: dict[str, float]) -> None:
        now = int(time.time() * 1e3)
        self._waiting += [self._metric(name, float(value), now, step) for name, value in values.items()]

    def window(self, step: int, text: str, brief: str) -> None:
        self.flush()

    def flush(self) -> None:
        """Send what waits. A batch is sent again later, unless the server answers that its content is invalid.

        Beyond _MOST_WAITING points, the oldest are dropped.
        """
        with self._tolerant():
            while self._waiting:
                try:
                    self._client.log_batch(self._run, metrics=self._waiting[:_BATCH])
                except self._exception as error:
                    if error.get_http_status_code() == HTTPStatus.BAD_REQUEST:
                        self._drop(_BATCH)
                    raise
                del self._waiting[:_BATCH]
                self._failing = False
        self._drop(len(self._waiting) - _MOST_WAITING)

    def _drop(self, count: int) -> None:
        dropped = self._waiting[: max(0, count)]
        self._lost += len(dropped)
        del self._waiting[: len(dropped)]

    def hparams(self, parameters: dict, results: dict) -> None:
        with self._tolerant():
            self.send(0, {f"result/{name}": value for name, value in results.items() if value is not None})
            self._complete = True

    def picture(self, step: int, title: str, path: Path) -> None:
        with self._tolerant():
            self._client.log_artifact(self._run, str(path), title.rpartition("/")[0])

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.flush()
            if lost := self._lost + len(self._waiting):
                log.error("mlflow: points not sent: %d; metrics.jsonl has those of the steps", lost)
            with self._tolerant():
                self._client.set_terminated(self._run, "FINISHED" if self._complete else "KILLED")


def _flat(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in node.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return found
