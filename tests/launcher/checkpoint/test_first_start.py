"""``run.resume = "auto"``: one command from the first start of a run to its last, and no silent second beginning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from launcher.checkpoint.resume import find_resume
from launcher.config.load_config import load_run_config
from launcher.metrics.record import DISCARDED_FILE, METRICS_FILE, read_metrics
from launcher.training.run_stop import resume_command
from longctx.checkpoint_format import CHECKPOINTS, MANIFEST, list_checkpoints
from longctx.errors import CheckpointError
from tests.launcher.workers import refuse_each, rows, run, train, train_until_killed_in_a_step

pytestmark = pytest.mark.timeout(240)

SAME = {"run.resume": "auto", "train.steps": 4, "validation.rows": 0}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Where this module's runs lie."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def never_saved(shards, base) -> Path:
    """A first start in an empty folder, killed in step 2, before the first checkpoint."""
    folder = base / "run"
    with pytest.raises(AssertionError):
        run(train_until_killed_in_a_step, 2, shards, folder, SAME, 1, 2)
    assert not list_checkpoints(folder)
    assert [row["step"] for row in rows(folder)] == [1]
    return folder


@pytest.fixture(scope="module")
def begun_again(shards, never_saved) -> Path:
    """The second start of the same command, stopped behind step 2."""
    folder = Path(shutil.copytree(never_saved, never_saved.with_name("again")))
    run(train, 2, shards, folder, {**SAME, "train.stop_after": 2})
    return folder


def test_the_same_command_begins_begins_again_and_goes_on(shards, base, never_saved, begun_again):
    discarded = [json.loads(line) for line in (begun_again / DISCARDED_FILE).read_text().splitlines()]
    assert discarded == [json.loads(line) for line in (never_saved / METRICS_FILE).read_text().splitlines()]
    log = (begun_again / "logs" / "rank_0.log").read_text()
    said = f"the run starts from scratch, and {len(discarded)} lines from metrics.jsonl were moved to"
    assert log.count(said) == 1

    folder = Path(shutil.copytree(begun_again, base / "third"))
    run(train, 2, shards, folder, SAME)
    run(train, 2, shards, base / "unbroken", {**SAME, "run.resume": "no"})
    assert rows(folder) == rows(base / "unbroken"), "to the last bit"
    assert [r["step"] for r in read_metrics(folder) if r.get("event") == "resume"] == [2]
    assert (folder / "logs" / "rank_0.log").read_text().count(said) == 1


@pytest.mark.slow
def test_what_was_recorded_of_experts_is_no_reason_to_refuse_a_second_start(shards, base, never_saved, tmp_path):
    """It is this run's own; without an earlier start it is another's."""
    recorded = {**SAME, "train.steps": 2, "train.record_routing": tmp_path / "routing"}
    folder = Path(shutil.copytree(never_saved, tmp_path / "run"))
    (tmp_path / "routing").mkdir()
    (tmp_path / "routing" / "step_000001.safetensors").touch()
    run(train, 2, shards, folder, recorded)
    assert (tmp_path / "routing" / "step_000001.safetensors").stat().st_size
    with pytest.raises(AssertionError, match="already holds a run's routing"):
        run(train, 2, shards, tmp_path / "other", recorded)


def lose_the_manifest(folder: Path) -> str:
    (list_checkpoints(folder)[-1] / MANIFEST).unlink()
    return f"step_000002 exists without its {MANIFEST}"


def set_aside_all(folder: Path) -> str:
    for path in list_checkpoints(folder):
        path.rename(path.with_name(f"{path.name}.discarded"))
    return "an earlier start set step_000002.discarded aside"


def spoil_all(folder: Path) -> str:
    for path in list_checkpoints(folder):
        (path / MANIFEST).write_text("{")
    return "step_000002: "


def cut_a_file_short(folder: Path) -> str:
    path = list_checkpoints(folder)[-1] / "rank_00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    return "step_000002: rank_00001.safetensors has"


def lose_all_after_a_resume(folder: Path) -> str:
    shutil.rmtree(folder / CHECKPOINTS)
    with (folder / METRICS_FILE).open("a") as file:
        file.write(json.dumps({"kind": "event", "event": "resume", "step": 2, "time": "", "loss": 1.0}) + "\n")
    return "metrics.jsonl records a resume at step 2, which needs a checkpoint"


def lose_all_after_many_steps(folder: Path) -> str:
    shutil.rmtree(folder / CHECKPOINTS)
    with (folder / METRICS_FILE).open("a") as file:
        file.write(json.dumps({"kind": "train", "event": None, "step": 5, "time": "", "loss": 1.0}) + "\n")
    return "metrics.jsonl reaches step 5, with checkpoint.every_steps=2"


LOSSES = [
    lose_the_manifest,
    set_aside_all,
    spoil_all,
    cut_a_file_short,
    lose_all_after_a_resume,
    lose_all_after_many_steps,
]


def test_a_run_that_has_saved_never_begins_anew(shards, begun_again, tmp_path):
    """On every rank alike, on one screen, and nothing is touched."""
    cases, before = [], {}
    for loss in LOSSES:
        folder = Path(shutil.copytree(begun_again, tmp_path / loss.__name__))
        words = ["run.resume='auto'", loss(folder), "start a new run: --run.resume no"]
        cases.append(({**SAME, "run.output_dir": folder}, words))
        before[folder] = (folder / METRICS_FILE).read_bytes()
    run(refuse_each, 2, shards, tmp_path, cases)
    for folder, content in before.items():
        assert (folder / METRICS_FILE).read_bytes() == content


def test_what_is_no_sign_of_a_checkpoint(tmp_path):
    """Saves that were killed, and as many steps as may pass before the first one is committed."""
    assert find_resume(tmp_path, "auto") is None
    (tmp_path / CHECKPOINTS / ".step_000002.partial").mkdir(parents=True)
    (tmp_path / "config.toml").write_text("[checkpoint]\nevery_steps = 2\n")
    lines = [json.dumps({"kind": "train", "step": step, "loss": 1.0}) + "\n" for step in (1, 2, 3, 4)]
    (tmp_path / METRICS_FILE).write_text("".join(lines) + '{"kind": "tr')
    assert find_resume(tmp_path, "auto") is None
    for strict in ("latest", "newest-good"):
        with pytest.raises(CheckpointError, match="holds no committed checkpoint"):
            find_resume(tmp_path, strict)


def test_the_model_is_named_by_the_first_start_and_by_the_checkpoint_afterwards(begun_again, tmp_path):
    line = ["--run.resume", "auto", "--model.preset", "none", "--run.output_dir"]
    with pytest.raises(Exception, match="The config defines no model"):
        load_run_config([*line, str(tmp_path)])
    assert load_run_config([*line, str(begun_again)]).model.hidden_size == 32


def test_the_line_to_go_on_with_is_the_same_line():
    words = ["deepspeed", "launcher/pretrain.py", "--run.resume", "auto", "--run.seed", "3"]
    assert resume_command(words) == " ".join(words)
    assert resume_command([*words[:3], "no", *words[4:]]).endswith("--run.seed 3 --run.resume latest")
