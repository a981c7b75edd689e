"""The adaptors against the real packages, without a network: two attempts of a run are one run of the tracker.

They need ``pip install 'longctx-train[wandb,trackio,mlflow]'``, and are skipped, by name, without.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.metrics.trackers import tracker_threads
from launcher.metrics.trackers.tracker_threads import PACKAGES, check_trackers, open_trackers
from tests.launcher.metrics.test_metrics import VALIDATION, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Points = list[tuple[int, float]]
"""Of one curve: steps and values, in the order written."""


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    """No account and no server of whoever runs this."""
    for name in list(os.environ):
        if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(tracker_threads, "ALWAYS", ())
    # It reads its variables once in a process.
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()
    # On a busy machine an import alone may take longer than a run waits for.
    monkeypatch.setattr(tracker_threads, "DONE_SECONDS", 120.0)


def need(name: str) -> None:
    missing = [package for package in PACKAGES[name] if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} is not installed")
    check_trackers([name])


def read_mlflow(folder: Path) -> tuple[Points, dict, str]:
    script = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(f"sqlite:///{sys.argv[1]}/mlflow.db")
(run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
points = [(p.step, p.value) for p in client.get_metric_history(run.info.run_id, "train/loss")]
texts = [f.path for f in client.list_artifacts(run.info.run_id, "sample")]
print(json.dumps([points, run.data.params | run.data.tags, run.info.status, texts]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder.resolve())], capture_output=True, text=True, check=True
    )
    points, config, status, texts = json.loads(done.stdout.splitlines()[-1])
    assert status == "FINISHED"
    return [tuple(point) for point in points], config, " ".join(texts)


def read_trackio(folder: Path) -> tuple[Points, dict, str]:
    with sqlite3.connect(folder.parent / "trackio" / "mine.db") as base:
        rows = base.execute("select run_id, step, metrics from metrics order by id").fetchall()
        configs = base.execute("select config from configs").fetchall()
    assert len({run_id for run_id, _, _ in rows}) == 1
    points = [(step, json.loads(m)["train/loss"]) for _, step, m in rows if "train/loss" in json.loads(m)]
    texts = [json.loads(m)["sample"] for _, _, m in rows if "sample" in json.loads(m)]
    return points, json.loads(configs[0][0]), json.dumps(texts)


def read_wandb(folder: Path) -> tuple[Points, dict, str]:
    """W&B has a file for each attempt, which its server puts together by their one id."""
    script = """
import json, struct, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2
points, ids, config, texts, numbers = [], [], {}, [], []
for path in sorted(Path(sys.argv[1]).glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime):
    # Blocks of 32 KiB, records of LevelDB's log format behind 7 bytes of the file's own.
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            record = wandb_internal_pb2.Record.FromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == "run":
                ids.append(record.run.run_id)
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.WhichOneof("record_type") == "history":
                row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                numbers.append(row.get("_step", record.history.step.num))
                if "train/loss" in row:
                    points.append((row["step"], row["train/loss"]))
                texts += [key for key in row if key.startswith("sample")]
print(json.dumps([points, ids, config, texts, numbers]))
"""
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True)
    points, ids, config, texts, numbers = json.loads(done.stdout.splitlines()[-1])
    assert len(set(ids)) == 1, "one id"
    assert numbers == sorted(set(numbers)), "rows whose number goes back would be refused"
    return [tuple(point) for point in points], config, " ".join(texts)


READERS: dict[str, Callable[[Path], tuple[Points, dict, str]]] = {
    "wandb": read_wandb,
    "trackio": read_trackio,
    "mlflow": read_mlflow,
}


@pytest.mark.parametrize("name", READERS)
def test_a_resumed_run_goes_on_in_the_trackers_run(name, tmp_path, caplog, capfd, monkeypatch):
    need(name)
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--data.train", "s3://me:never-told@host/x"])
    # The second attempt goes on from step 1, with another rate: MLflow never changes a parameter.
    for rate, steps, time in ((0.5, (1, 2), "2025-01-01T00:00:00+00:00"), (0.25, (2, 3), "2025-01-02T00:00:00+00:00")):
        config = {"train": {"lr": rate}, "run": {"seed": 3}}
        trackers = open_trackers([name], folder, project="mine", config=config, first_step=steps[0])
        for step in steps:
            trackers.send(train(step, loss=float(step), time=time))
        trackers.send({**VALIDATION, "step": steps[-1], "sample": {"prompt": "Once", "text": " upon"}})
        trackers.close("done")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert capfd.readouterr() == ("", ""), "the console belongs to the run"
    points, config, texts = READERS[name](folder)
    assert points == [(1, 1.0), (2, 2.0), (2, 2.0), (3, 3.0)]
    assert str(config["run.seed"]) == "3"
    if name == "mlflow":
        assert (config["train.lr"], config["resumed.train.lr"]) == ("0.5", "0.25")
    assert texts
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"never-told" in path.read_bytes()]


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("wandb", {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "never-told".rjust(40, "0")}),
        ("trackio", {"TRACKIO_SERVER_URL": "http://me:never-told@127.0.0.1:9/?write_token=abcdefgh"}),
        ("mlflow", {"MLFLOW_TRACKING_URI": "http://me:never-told@127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}),
    ],
)
def test_a_server_that_does_not_answer_ends_no_run_and_no_secret_is_told(
    name, variables, tmp_path, monkeypatch, caplog, capfd
):
    need(name)
    monkeypatch.delenv("WANDB_MODE")
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    with caplog.at_level(logging.INFO, "launcher"):
        trackers = open_trackers([name], tmp_path, project="mine", config={}, first_step=0)
        trackers.send(train(1))
        trackers.close("done")
    said = caplog.text + "".join(capfd.readouterr())
    assert "never-told" not in said
    assert {"wandb": "W&B is unreachable", "trackio": "could not be sent", "mlflow": "mlflow failed"}[name] in said
    if name == "wandb":
        points, _, _ = read_wandb(tmp_path)
        assert points == [(1, train(1)["loss"])]
