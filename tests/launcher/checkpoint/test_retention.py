"""Which checkpoints stay, which removals and saves that were killed go, and which checkpoints are good."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.checkpoint import names as remove
from launcher.checkpoint.resume import find_resume, remove_checkpoint_leftovers
from launcher.checkpoint.retention import (
    Proof,
    Retention,
    RetentionCandidate,
    first_nonfinite_step,
    is_in_range,
    is_stable,
    prune_checkpoints,
    write_proof,
)
from launcher.config.run_config_rules import check_run
from launcher.metrics.record import METRICS_FILE, encode
from longctx.checkpoint_format import CHECKPOINTS, MANIFEST, PROOF_FILE, CheckpointReader, list_checkpoints
from longctx.errors import ConfigError
from tests.launcher.runs import tiny_config
from tests.longctx.test_checkpoint_format import write_model

NO_LOSS: Mapping[int, float] = {}


def candidates(
    *steps: int, losses: Mapping[int, float] = NO_LOSS, proved: tuple[int, ...] = ()
) -> list[RetentionCandidate]:
    return [
        RetentionCandidate(
            folder=Path(str(step)), step=step, validation_loss=losses.get(step), is_stable=step in proved
        )
        for step in steps
    ]


def kept(retention: Retention, found: list[RetentionCandidate]) -> list[int]:
    return sorted(retention.reasons(found))


class TestRule:
    @pytest.mark.parametrize(
        ("rule", "steps"),
        [
            ({"last": 0}, [10, 20, 30, 40, 50]),
            ({"last": 1}, [50]),
            ({"last": 9}, [10, 20, 30, 40, 50]),
            ({"last": 1, "every": 20}, [20, 40, 50]),
            ({"last": 1, "best": 1}, [20, 50]),
            ({"last": 1, "best": 2}, [20, 40, 50]),
            ({"last": 1, "best": 2, "every": 30}, [20, 30, 40, 50]),
        ],
    )
    def test_newest_every_and_best(self, rule, steps):
        losses = {20: 2.0, 30: 3.0, 40: 2.5}
        assert kept(Retention(**rule), candidates(10, 20, 30, 40, 50, losses=losses)) == steps

    def test_the_newest_proved_and_of_equal_losses_the_newer_one(self):
        assert kept(Retention(last=1), candidates(10, 20, 30, proved=(10, 20))) == [20, 30]
        assert kept(Retention(last=1), candidates(10, 20, 30, proved=(10, 20, 30))) == [30]
        assert kept(Retention(last=1, best=1), candidates(10, 20, 30, losses={10: 1.0, 20: 1.0})) == [20, 30]

    def test_each_has_its_reason(self):
        found = Retention(last=1, every=20, best=1).reasons(candidates(10, 20, 30, 40, losses={10: 1.0}, proved=(30,)))
        assert found == {40: "last 1", 20: "every 20", 10: "best 1", 30: "newest proved"}

    @given(st.sets(st.integers(1, 60)), st.integers(1, 5), st.integers(0, 9), st.integers(0, 4), st.integers(0, 60))
    def test_the_newest_and_a_proved_one_are_never_lost(self, steps, last, every, best, proved):
        found = candidates(*steps, losses={step: float(step % 7) for step in steps}, proved=(proved,))
        stay = kept(Retention(last=last, every=every, best=best), found)
        assert set(sorted(steps)[-last:]) <= set(stay)
        assert proved in stay or proved not in steps


class TestConfig:
    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            ({"checkpoint.keep_every": -1}, "checkpoint.keep_every=-1 must be at least 0"),
            ({"checkpoint.keep_every": 4}, "checkpoint.keep_last=0 keeps all"),
            ({"checkpoint.keep_last": 1, "checkpoint.keep_every": 5}, "Try checkpoint.keep_every=4"),
            ({"checkpoint.keep_last": 1, "checkpoint.keep_best": 1}, "Try validation.every_steps=2"),
            ({"checkpoint.keep_last": 1, "checkpoint.keep_best": 1, "validation.rows": 0}, "rows=0 turns validation"),
        ],
    )
    def test_what_would_have_no_effect_is_refused(self, tmp_path, changed, said):
        config = tiny_config(tmp_path, tmp_path, changed)
        with pytest.raises(ConfigError) as caught:
            check_run(config, 2)
        assert said in str(caught.value)

    def test_what_has_one_is_taken(self, tmp_path):
        changed = {"keep_last": 1, "keep_best": 1, "keep_every": 4, "every_steps": 4}
        check_run(tiny_config(tmp_path, tmp_path, {f"checkpoint.{key}": value for key, value in changed.items()}), 2)


# Folders.


def commit(run: Path, step: int, *, loss: float | None = None, whole: bool = True) -> Path:
    """A checkpoint of a tiny model."""
    folder = write_model(run / CHECKPOINTS / f"step_{step:06d}", step=step, training={"validation_loss": loss})
    if not whole:
        (folder / "f0.safetensors").unlink()
    return folder


def prove(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    write_proof(folder, manifest["hash"], Proof("step", 7, 2.5))


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / CHECKPOINTS).iterdir())


def test_prune_goes_by_what_manifests_say(tmp_path):
    for step, loss in ((2, 3.0), (4, 1.0), (6, float("nan")), (8, 2.0), (10, None)):
        commit(tmp_path, step, loss=loss)
    prove(tmp_path / CHECKPOINTS / "step_000002")
    prune_checkpoints(tmp_path, Retention(last=1, best=2))
    assert names(tmp_path) == ["step_000002", "step_000004", "step_000008", "step_000010"]
    prune_checkpoints(tmp_path, Retention(last=0))
    assert len(names(tmp_path)) == 4


def test_one_that_cannot_be_removed_costs_a_warning(tmp_path, monkeypatch, caplog):
    for step in (2, 4, 6):
        commit(tmp_path, step)

    def refuse(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(f"{path} is not to be removed")

    monkeypatch.setattr(remove.shutil, "rmtree", refuse)
    prune_checkpoints(tmp_path, Retention(last=1))
    assert caplog.text.count("could not be removed") == 2
    # It has lost its name all the same: what is half-removed is no checkpoint.
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000006"]


def test_a_start_removes_what_accidents_left_and_says_so(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    whole = commit(tmp_path, 2)
    for name in (".step_000004.partial", ".step_000001.removed", "step_000006.discarded"):
        shutil.copytree(whole, whole.with_name(name))
    remove_checkpoint_leftovers(tmp_path)
    assert names(tmp_path) == ["step_000002"]
    for words in ("left by a killed save", "left by a killed removal", "set aside when the run resumed"):
        assert caplog.text.count(words) == 1


# Proofs.


def test_a_loss_is_in_range_when_it_is_finite_and_near():
    assert is_in_range(6.0, 3.0)
    assert not is_in_range(6.1, 3.0)
    assert is_in_range(0.9, 0.01)
    assert not any(is_in_range(loss, 3.0) for loss in (float("nan"), float("inf")))
    assert not is_in_range(3.0, float("nan"))


def test_a_proof_is_of_one_manifest(tmp_path):
    first, second = commit(tmp_path, 2), commit(tmp_path, 4)
    prove(first)
    assert RetentionCandidate.of(first).is_stable
    assert CheckpointReader(first).extra_files() == []
    shutil.copy(first / PROOF_FILE, second / PROOF_FILE)
    assert not RetentionCandidate.of(second).is_stable, "of another one"
    for text in ("", "[]", "{", '{"manifest": null}', "[" * 100_000):
        (first / PROOF_FILE).write_text(text)
        assert not is_stable(first, "hash")
        assert not is_stable(first, None)


def test_what_nobody_listed_is_named(tmp_path):
    folder = commit(tmp_path, 2)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "more").mkdir()
    (folder / f".{PROOF_FILE}.host.1.tmp").write_text("")
    assert CheckpointReader(folder).extra_files() == ["more", "tokenizer.json"]


def record(run: Path, step: int, loss: float | None, grad_norm: float | None = 1.0) -> None:
    with (run / METRICS_FILE).open("a") as file:
        file.write(encode({"kind": "train", "step": step, "loss": loss, "grad_norm": grad_norm}) + "\n")


@pytest.fixture
def broken_run(tmp_path) -> Path:
    """Checkpoints of steps 2, 4 and 6; step 7 gave no number."""
    for step in (2, 4, 6):
        commit(tmp_path, step)
    for step in range(1, 7):
        record(tmp_path, step, 3.0)
    record(tmp_path, 7, float("nan"), None)
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"kind": "tr')
    return tmp_path


def test_the_first_step_after_it_that_was_not_finite(broken_run):
    assert [first_nonfinite_step(broken_run, step) for step in (4, 6, 7)] == [7, 7, None]
    assert first_nonfinite_step(broken_run, 4, before=6) is None
    assert first_nonfinite_step(broken_run / "nowhere", 4) is None


def test_a_step_in_which_no_token_counts_is_not_broken(tmp_path):
    commit(tmp_path, 2)
    record(tmp_path, 3, None, 0.0)
    assert first_nonfinite_step(tmp_path, 2) is None
    record(tmp_path, 4, None, float("inf"))
    assert first_nonfinite_step(tmp_path, 2) == 4


def step_of(path: Path | None) -> int:
    assert path is not None
    return int(path.name[-6:])


class TestNewestGood:
    def test_whole_and_not_proved_is_good_and_a_proof_mends_no_damage(self, tmp_path):
        commit(tmp_path, 2)
        prove(commit(tmp_path, 4, whole=False))
        assert step_of(find_resume(tmp_path, "newest-good")) == 2
        commit(tmp_path, 6)
        assert step_of(find_resume(tmp_path, "newest-good")) == 6

    def test_training_broke_right_after_it(self, broken_run, caplog):
        prove(broken_run / CHECKPOINTS / "step_000002")
        # Steps 5 and 6 went on from the fourth: it is good, though its proof was never written.
        assert step_of(find_resume(broken_run, "newest-good")) == 4
        assert "step_000006: step 7 after it was not finite" in caplog.text
        assert step_of(find_resume(broken_run, "latest")) == 6

    def test_it_is_proved_all_the_same(self, broken_run):
        prove(broken_run / CHECKPOINTS / "step_000006")
        assert step_of(find_resume(broken_run, "newest-good")) == 6

    def test_none_is_better(self, broken_run, caplog):
        for step in (2, 4):
            shutil.rmtree(broken_run / CHECKPOINTS / f"step_{step:06d}")
        assert step_of(find_resume(broken_run, "newest-good")) == 6
        assert "No other checkpoint is good" in caplog.text
