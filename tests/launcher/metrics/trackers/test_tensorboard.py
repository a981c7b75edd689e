"""TensorBoard's curves of a run, of its later attempts, and on a disk that is full."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import launcher.report.page
from launcher.metrics.trackers.tracker_threads import Trackers, open_trackers
from launcher.training.trainer import Trainer
from tests.launcher.faults.disk import small_disk
from tests.launcher.metrics.test_metrics import VALIDATION, train
from tests.launcher.workers import build, run


def curves_of(folder: Path, first_step: int) -> Trackers:
    return open_trackers((), folder, project="", config={}, first_step=first_step)


def drawn(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard")).Reload()


def test_an_attempt_hides_what_comes_again(tmp_path: Path) -> None:
    for first_step, steps, loss in ((0, (1, 2, 3), 1.0), (3, (3, 4), 11.0)):
        trackers = curves_of(tmp_path, first_step)
        for step in steps:
            trackers.send(train(step, loss=loss * step))
        trackers.send({**VALIDATION, "sample": {"prompt": "Once", "text": " upon"}})
        trackers.close("done")
    found = drawn(tmp_path)
    points = [(point.step, point.value) for point in found.Scalars("train/loss")]
    assert points == [(1, 1.0), (2, 2.0), (3, 33.0), (4, 44.0)]
    assert found.Scalars("expert_max_over_mean/layer_3")[0].value == pytest.approx(1.3)
    assert found.Scalars("router_entropy/layer_1")[0].value == pytest.approx(1.2)
    assert {"expert_max_over_mean/layer_0", "train/mfu"}.isdisjoint(found.Tags()["scalars"])
    assert b"Once upon" in found.Tensors("sample/text_summary")[0].tensor_proto.string_val[0]


def test_a_full_disk_ends_the_curves_and_no_run(tmp_path, caplog, capfd):
    with small_disk(tmp_path / "tensorboard", "8k"):
        trackers = curves_of(tmp_path, 0)
        for step in range(1, 400):
            trackers.send(train(step))
        trackers.close("done")
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "Tracker tensorboard failed: OSError" in said
    assert "No space left on device" in said
    assert "Traceback" not in capfd.readouterr().err


def train_drawing(shards: Path, output: Path, changed: Mapping[str, Any]) -> None:
    launcher.report.page.write_report = lambda folder: folder / "report.html"
    Trainer(build(shards, output, changed)).train()


@pytest.mark.slow
def test_a_resumed_run_keeps_its_curves(shards, tmp_path):
    changed = {"train.steps": 3, "validation.rows": 0}
    run(train_drawing, 2, shards, tmp_path / "run", {**changed, "train.stop_after": 2})
    run(train_drawing, 2, shards, tmp_path / "run", {**changed, "run.resume": "latest"})
    assert [point.step for point in drawn(tmp_path / "run").Scalars("train/loss")] == [1, 2, 3]
