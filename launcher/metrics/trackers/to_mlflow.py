"""MLflow: the only file that imports it. MLFLOW_TRACKING_URI names a server; without it the run folder has a database.

The client's methods are called, not the global ones: nothing depends on an active run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
from mlflow.entities import Metric, Param, RunTag  # pyright: ignore[reportMissingImports]
from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]

from launcher.metrics.trackers.start import Start

log = logging.getLogger(__name__)

NAME = "mlflow"
_PARAMS_AT_ONCE = 100
_METRICS_AT_ONCE = 1000
"""The most that MLflow takes in one call."""
_STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


def open_tracker(start: Start) -> MlflowRun:
    """Go on with the run's MLflow run, or make one."""
    uri, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
    if not uri:
        place = start.folder.resolve()
        uri, artifacts = f"sqlite:///{place}/mlflow.db", (place / "mlartifacts").as_uri()
    client = MlflowClient(uri)
    run_id = start.remembered(NAME).get("run_id")
    if run_id is None or not _goes_on(client, run_id):
        experiment = client.get_experiment_by_name(start.project)
        experiment_id = experiment.experiment_id if experiment else _new_experiment(client, start.project, artifacts)
        run_id = client.create_run(experiment_id, run_name=start.name).info.run_id
        start.remember(NAME, {"run_id": run_id, "project": start.project})
    _write_config(client, run_id, start.config)
    return MlflowRun(client, run_id)


def _goes_on(client: Any, run_id: str) -> bool:
    """Open a run once more; whether there is one: somebody may have deleted it, or have changed the server."""
    try:
        client.update_run(run_id, status="RUNNING")
    except MlflowException:
        log.warning("MLflow has no run %s any more: a new one is made.", run_id)
        return False
    return True


def _new_experiment(client: Any, name: str, artifacts: str | None) -> str:
    try:
        return client.create_experiment(name, artifact_location=artifacts)
    except MlflowException:
        # Another run has made it meanwhile.
        return client.get_experiment_by_name(name).experiment_id


def _write_config(client: Any, run_id: str, config: Mapping[str, Any]) -> None:
    """Settings as parameters. MLflow never changes one: what a resume has changed is a tag."""
    known = client.get_run(run_id).data.params
    new = [Param(key, str(value)) for key, value in config.items() if key not in known]
    for at in range(0, len(new), _PARAMS_AT_ONCE):
        client.log_batch(run_id, params=new[at : at + _PARAMS_AT_ONCE])
    changed = {key: str(value) for key, value in config.items() if known.get(key, str(value)) != str(value)}
    tags = [RunTag(f"resumed.{key}", value) for key, value in changed.items()]
    for at in range(0, len(tags), _PARAMS_AT_ONCE):
        client.log_batch(run_id, tags=tags[at : at + _PARAMS_AT_ONCE])


class MlflowRun:
    """Writes to one run of MLflow."""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id = client, run_id

    def metrics(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Log a point of each curve in one call."""
        points = [Metric(key, value, round(seconds * 1000), step) for key, value in values.items()]
        for at in range(0, len(points), _METRICS_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=points[at : at + _METRICS_AT_ONCE])

    def text(self, step: int, name: str, text: str) -> None:
        """Write a file beside the run."""
        self._client.log_text(self._run_id, text, f"{name}/step_{step:06d}.txt")

    def finish(self, how: str) -> None:
        """Say how the run ended."""
        self._client.set_terminated(self._run_id, _STATUS[how])
