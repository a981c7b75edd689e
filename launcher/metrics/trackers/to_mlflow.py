"""MLflow adapter, the only file that imports it. MLFLOW_TRACKING_URI names a server; the default is a database."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

from launcher.metrics.trackers.tracker import TrackedRun

# The import reads these variables, so set them first.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")

from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
from mlflow.entities import Metric, Param, RunTag  # pyright: ignore[reportMissingImports]
from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]
from mlflow.utils.logging_utils import disable_logging  # pyright: ignore[reportMissingImports]


class MlflowTracker:
    """One MLflow run."""

    def __init__(self, run: TrackedRun) -> None:
        # MLflow logs to the console and may print a server URL with a password.
        disable_logging()
        uri, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:
            place = run.folder.resolve()
            # Absolute paths: the next attempt may start in another directory.
            uri, artifacts = f"sqlite:///{place}/mlflow.db", (place / "mlartifacts").as_uri()
        self._client = MlflowClient(uri)
        self._run_id = run.load_state("mlflow").get("run_id")
        try:
            self._client.update_run(self._run_id or "", status="RUNNING")
        except MlflowException:
            # No run yet, run deleted, or server changed. Another run may create the experiment meanwhile.
            with suppress(MlflowException):
                self._client.create_experiment(run.project, artifact_location=artifacts)
            experiment = self._client.get_experiment_by_name(run.project)
            self._run_id = self._client.create_run(experiment.experiment_id, run_name=run.name).info.run_id
            run.store_state("mlflow", {"run_id": self._run_id, "project": run.project})
        # MLflow never changes a parameter, so a setting changed on resume becomes a tag.
        config = {key: str(value) for key, value in run.config.items()}
        known = self._client.get_run(self._run_id).data.params
        new = [Param(key, value) for key, value in config.items() if key not in known]
        tags = [RunTag(f"resumed.{key}", value) for key, value in config.items() if known.get(key, value) != value]
        self._client.log_batch(self._run_id, params=new, tags=tags)

    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Log one point per curve in one call."""
        points = [Metric(key, value, round(seconds * 1000), step) for key, value in values.items()]
        self._client.log_batch(self._run_id, metrics=points)

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text file into the run's artifacts."""
        self._client.log_text(self._run_id, text, f"{name}/step_{step:06d}.txt")

    def close(self, how: str) -> None:
        """Set the run's final status."""
        self._client.set_terminated(self._run_id, {"done": "FINISHED", "stopped": "KILLED"}.get(how, "FAILED"))
