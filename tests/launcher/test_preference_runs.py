"""Runs that compare replies: references, training on one rank and several, resuming, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.shards.manifest import VALIDATION_FOLDER
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.references import write_references
from launcher.config.load_config import load_run_config
from launcher.config.objective import check_objective
from launcher.evaluation.evaluation_run import no_progress
from launcher.evaluation.reference_run import ReferenceOptions, score_replies
from launcher.metrics.record import read_metrics
from launcher.training.reply_checks import check_replies
from longctx.checkpoint_format import list_checkpoints
from longctx.errors import ConfigError
from longctx.tokenizer import load_tokenizer
from tests.data_pipeline.preference_records import write_preferences
from tests.helpers import run_distributed
from tests.launcher.cli.calls import call, succeed
from tests.launcher.runs import resolved, tiny_start
from tests.launcher.test_adapters import train_adapters
from tests.launcher.workers import run, train

pytestmark = pytest.mark.timeout(240)

SIZES = [(n % 23 + 1, n % 7 + 2, n % 11 + 3) for n in range(60)]
COMPARED = {"train.objective": "preferences", "data.packing": "best_fit", "validation.every_steps": 2}


@pytest.fixture(scope="module")
def base(shards, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "base"
    run(train, 2, shards, folder, {"train.steps": 2, "validation.rows": 0})
    return folder


@pytest.fixture(scope="module")
def preferences(shards, base) -> Path:
    """Records with the base's references, and held-out ones."""
    folder, tokenizer = base.with_name("preferences"), load_tokenizer(shards)
    write_preferences(folder, tokenizer, SIZES)
    write_preferences(folder / VALIDATION_FOLDER, tokenizer, SIZES[:7])
    score(base, folder)
    return folder


def score(checkpoint: Path, folder: Path, **options: Any) -> None:
    score_replies(ReferenceOptions(checkpoint=checkpoint, data=str(folder), hostfile="none", **options), no_progress)


def of_steps(folder: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(folder) if record["kind"] == "train"]


@pytest.fixture(scope="module")
def tuned(preferences, base) -> Path:
    folder = base.with_name("tuned")
    run(train_adapters, 2, preferences, folder, {**COMPARED, "run.start_from": base, "zero.stage": 2})
    return folder


def test_ranks_store_the_references_of_one_process(preferences, base, tmp_path):
    copied = Path(shutil.copytree(preferences, tmp_path / "copied"))
    wanted = ShardSet.open(copied).references
    run_distributed(score, 2, base, copied, timeout=120)
    found = ShardSet.open(copied).references
    assert wanted is not None
    assert found is not None
    np.testing.assert_allclose(found.sums_N2, wanted.sums_N2, rtol=1e-6)
    assert found.origin == wanted.origin
    assert (wanted.sums_N2 < 0).all()


def test_a_run_begins_at_its_reference_and_moves_away(tuned):
    steps = of_steps(tuned)
    assert abs(steps[0]["loss"] - math.log(2)) < 1e-6
    assert abs(steps[0]["reference_kl"]) < 1e-4
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["preference_accuracy"] > 0.5
    held_out = [record for record in read_metrics(tuned) if record["kind"] == "validation"]
    assert {record["num_targets"] for record in held_out} == {7}
    assert all(record["unigram_entropy"] is None and 0 <= record["preference_accuracy"] <= 1 for record in held_out)


def test_ranks_with_rows_of_their_own_share_prompts(preferences, base):
    folder = base.with_name("shared")
    changed = {**COMPARED, "run.start_from": base, "zero.stage": 3, "parallel.context": 1, "train.steps": 2}
    run(train_adapters, 2, preferences, folder, changed)
    first = of_steps(folder)[0]
    assert abs(first["loss"] - math.log(2)) < 1e-6
    assert abs(first["reference_kl"]) < 1e-4


def test_a_run_goes_on_as_if_it_had_not_stopped(preferences, base, tuned):
    stopped = Path(shutil.copytree(tuned, tuned.with_name("stopped")))
    shutil.rmtree(list_checkpoints(stopped)[-1])
    changed = {**COMPARED, "run.start_from": base, "run.resume": "latest", "zero.stage": 2}
    run(train_adapters, 2, preferences, stopped, changed)
    assert [step["loss"] for step in of_steps(stopped)] == [step["loss"] for step in of_steps(tuned)]


def test_adapters_learn_preferences(preferences, base):
    folder = base.with_name("adapters")
    adapter = {"model.adapter.rank": 4, "train.lr": 2e-2}
    run(train_adapters, 2, preferences, folder, {**COMPARED, **adapter, "run.start_from": base, "zero.stage": 2})
    steps = of_steps(folder)
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_single_replies_are_learned(shards, base):
    folder, output = base.with_name("labelled"), base.with_name("kto")
    write_preferences(folder, load_tokenizer(shards), SIZES, labels=[n % 2 for n in range(len(SIZES))])
    score(base, folder)
    changed = {**COMPARED, "run.start_from": base, "preference.loss": "kto", "validation.rows": 0}
    run(train_adapters, 2, folder, output, {**changed, "zero.stage": 1})
    steps = of_steps(output)
    assert abs(steps[0]["loss"] - 0.5) < 1e-6
    assert steps[-1]["loss"] < 0.5


def test_the_verb_says_what_it_stored(capsys, preferences, base, tmp_path):
    copied = Path(shutil.copytree(preferences, tmp_path / "copied"))
    words = ["score", "--references", "--checkpoint", base, "--data", copied]
    out = succeed(capsys, *words)
    assert f"{copied}: 60 records" in out
    assert f"{copied / VALIDATION_FOLDER}: 7 records" in out
    assert json.loads(succeed(capsys, *words, "--json"))[str(copied)]["records"] == 60
    for more, words_of_it in ((["--output", tmp_path / "x"], "no effect"), (["--experts"], "no effect")):
        code, _, err = call(capsys, *words, *more)
        assert code
        assert words_of_it in err
    code, _, err = call(capsys, "score", "--checkpoint", base, "--data", copied)
    assert code
    assert "--references for preferences" in err


def checked(data: Path, start: Path | str, **changed: Any) -> None:
    config = resolved(tiny_start(data, data / "run", {**COMPARED, "run.start_from": start, **changed}))
    check_replies(config, [ShardSet.open(data)], "started")


def test_references_of_other_weights_are_refused(preferences, base, tuned, tmp_path):
    copied = Path(shutil.copytree(preferences, tmp_path / "copied"))
    with pytest.raises(ConfigError, match=r"(?s)other weights .* set preference\.reference=any"):
        checked(copied, tuned)
    checked(copied, tuned, **{"preference.reference": "any"})
    checked(copied, base)
    stretched = {"model.rope.kind": "linear", "model.rope.factor": 2}
    with pytest.raises(ConfigError, match=r"another rope than the run's .* kind, factor"):
        checked(copied, base, **stretched)
    checked(copied, base, **stretched, **{"preference.reference": "any"})
    (copied / "references.arrow").unlink()
    with pytest.raises(ConfigError, match=r"no log-likelihoods of one.\nStore them with `longctx score --references"):
        checked(copied, base)
    checked(copied, base, **{"preference.loss": "orpo"})


def test_each_loss_reads_its_kind_of_records(preferences, base, shards, tmp_path):
    with pytest.raises(ConfigError, match=r"kto does not read .* pairs of replies"):
        checked(preferences, base, **{"preference.loss": "kto"})
    labelled = tmp_path / "labelled"
    write_preferences(labelled, load_tokenizer(shards), SIZES, labels=[n % 2 for n in range(len(SIZES))])
    with pytest.raises(
        ConfigError, match=r"dpo does not read .* single replies with labels.\nTry --preference.loss kto"
    ):
        checked(labelled, base)
    write_references(labelled, -np.ones((len(SIZES), 2)), {"weights": "other"})
    checked(labelled, "no", **{"preference.loss": "kto"})


ON = {"train.objective": "preferences"}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"preference.beta": 0.2}, "has no effect with train.objective=causal"),
        ({"data.share_prompts": "on"}, "has no effect with train.objective=causal"),
        ({**ON, "preference.margin": 0.2}, "Leave it out, or set preference.loss=simpo"),
        ({**ON, "train.z_loss": 1e-4}, "train.z_loss=0.0001 does not work"),
        ({**ON, "data.fim_rate": 0.1}, "Set data.fim_rate=0"),
        (
            {"train.objective": "preferences", "data.share_prompts": "on", "parallel.context": 2},
            "data.share_prompts=auto",
        ),
        ({**ON, "preference.beta": 0}, "must be a positive number"),
    ],
)
def test_options_without_effect_are_refused(changed, words):
    flags = [word for key, value in changed.items() for word in (f"--{key}", str(value))]
    with pytest.raises(ConfigError) as refused:
        check_objective(load_run_config(["--config", "quickstart", *flags]))
    assert words in str(refused.value)


def test_prompts_are_shared_where_the_layout_allows():
    words = ["--config", "quickstart", "--train.objective", "preferences"]
    assert load_run_config([*words, "--parallel.context", "1"]).shares_prompts
    assert not load_run_config([*words, "--parallel.context", "2"]).shares_prompts
    assert not load_run_config([*words, "--parallel.context", "1", "--data.share_prompts", "off"]).shares_prompts
