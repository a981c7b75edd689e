"""``score``: likelihoods are those of a plain pass over each document, on any ranks; a stopped one goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.nn.functional import log_softmax

import launcher.evaluation.score_run as scores
from data_pipeline.shards.marked import mask_of
from data_pipeline.shards.reader import ShardSet
from longctx.checkpoint_format import list_checkpoints
from longctx.generation.load_decoder import load_model
from longctx.model.experts.replay import RoutingReplay
from longctx.model.training_pass import TrainingPass
from longctx.tokenizer import load_tokenizer
from tests.data_pipeline.lengths import write_lengths
from tests.helpers import run_distributed
from tests.launcher.cli.calls import call
from tests.longctx.tokenizer.byte_level import tokenizer_json, write_tokenizer

LENGTHS = [50, 1, 2, 7, 131, 3, 40, 40]
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def data(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of which some tokens count."""
    folder = tmp_path_factory.mktemp("scored") / "shards"
    write_lengths(folder, load_tokenizer(world / "tokenizer.model"), LENGTHS, masked=True)
    return folder


def words(run: Path, data: Path, output: Path, *more: object) -> list[str]:
    options = {"checkpoint": run, "data": data, "output": output, "chunk-tokens": 30}
    return ["score", *(f"--{name}={value}" for name, value in options.items()), *map(str, more)]


def rows(folder: Path) -> list[dict[str, Any]]:
    tables = [pa.ipc.open_file(path).read_all() for path in sorted(folder.glob("*.arrow"))]
    return pa.concat_tables(tables).to_pylist()


@torch.no_grad()
def plain(run: Path, ids: list[int]) -> tuple[list[float], list[list[int]]]:
    """Log-likelihoods of a document's tokens after the first, and the experts of each: one pass, logits whole."""
    model = load_model(list_checkpoints(run)[-1], torch.float32)
    tokens_BT, replay = torch.tensor([ids]), RoutingReplay()
    hidden = model(tokens_BT, torch.arange(len(ids))[None], training_pass=TrainingPass(replay=replay))
    likelihoods = log_softmax(model.logits(hidden)[0].double(), -1)
    said = likelihoods[:-1].gather(1, tokens_BT[0, 1:, None])[:, 0].tolist()
    return said, replay.experts_LNk.transpose(0, 1).flatten(1).tolist()


def check(run: Path, data: Path, output: Path) -> None:
    shards, found = ShardSet.open(data), rows(output)
    assert [row["document"] for row in found] == list(range(len(LENGTHS)))
    for number, row in enumerate(found):
        ids = shards.document(number).tolist()
        assert (row["tokens"], row["name"]) == (ids, f"d{number}")
        assert row["log_likelihood"][0] is None
        if len(ids) == 1:
            assert set(row["experts"][0]) == {-1}
            continue
        likelihoods, experts = plain(run, ids)
        assert row["log_likelihood"][1:] == pytest.approx(likelihoods, abs=TOLERANCE)
        assert row["experts"] == experts


def test_each_token_is_scored_given_its_document(capsys, run, data, tmp_path):
    code, out, err = call(capsys, *words(run, data, tmp_path / "scores", "--experts", "--json"))
    assert code == 0, err
    check(run, data, tmp_path / "scores")
    total, shards = json.loads(out), ShardSet.open(data)
    found = rows(tmp_path / "scores")
    masks = [mask_of(shards.target_runs(number), length)[1:] for number, length in enumerate(LENGTHS)]
    values = [np.array(row["log_likelihood"][1:]) for row in found]
    assert (total["documents"], total["tokens"]) == (len(LENGTHS), sum(LENGTHS) - len(LENGTHS))
    assert total["log_likelihood"] == pytest.approx(sum(part.sum() for part in values), rel=1e-6)
    assert total["counted_tokens"] == sum(mask.sum() for mask in masks)
    wanted = sum(part[mask].sum() for part, mask in zip(values, masks, strict=True))
    assert total["counted_log_likelihood"] == pytest.approx(wanted, rel=1e-6)


def score_over_ranks(cases: list[list[str]]) -> None:
    from launcher.cli.cli_commands import main_over_ranks

    for case in cases:
        assert main_over_ranks("score", case[1:]) == 0


@pytest.mark.timeout(100)
def test_two_ranks_write_the_same(run, data, tmp_path, monkeypatch):
    """Two that share each document, and its experts, and two with documents of their own."""
    ways = {"shared": ["--parallel.expert=2"], "own": ["--parallel.context=1"]}
    run_distributed(
        score_over_ranks, 2, [words(run, data, tmp_path / name, "--experts", *way) for name, way in ways.items()]
    )
    for name in ways:
        check(run, data, tmp_path / name)


def test_a_stopped_one_goes_on_and_other_settings_are_refused(capsys, run, data, tmp_path, monkeypatch):
    monkeypatch.setattr(scores, "BLOCK_TOKENS", 50)
    output = tmp_path / "scores"
    assert call(capsys, *words(run, data, output))[0] == 0
    whole, files = rows(output), sorted(output.glob("*.arrow"))
    assert len(files) > 3
    for path in files[1::2]:
        path.unlink()
    kept = {path: path.stat().st_mtime_ns for path in files[::2]}
    assert call(capsys, *words(run, data, output))[0] == 0
    assert rows(output) == whole
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    code, _, err = call(capsys, *words(run, data, output, "--dtype=bfloat16"))
    assert code == 2
    assert "dtype: there 'float32', now 'bfloat16'" in err
    files[0].write_bytes(b"ARROW1 no more")
    code, _, err = call(capsys, *words(run, data, output))
    assert (code, "is not a score file" in err) == (1, True), err


def test_what_does_not_fit_is_one_screen(capsys, run, data, world, tmp_path):
    longer = tmp_path / "longer"
    write_lengths(longer, load_tokenizer(world / "tokenizer.model"), [5000])
    other = shutil.copytree(data, tmp_path / "other")
    (other / "manifest.json").write_text("{}")
    for changed, said in [
        ({"data": tmp_path / "none"}, "none"),
        ({"data": longer}, "5,000 tokens"),
        ({"data": other}, "manifest.json"),
        ({"run": tmp_path}, "checkpoint"),
    ]:
        given = {"run": run, "data": data, **changed}
        code, out, err = call(capsys, *words(given["run"], given["data"], tmp_path / "scores"))
        assert (code in (1, 2), out) == (True, ""), err
        assert said in err
        assert len(err.splitlines()) < 25
    write_tokenizer(tmp_path / "another", tokenizer_json())
    bare = shutil.copytree(world / "hf", tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    code, out, err = call(capsys, *words(bare, data, tmp_path / "scores"), "--tokenizer", tmp_path / "another")
    assert (code, out, "built with a different tokenizer" in err) == (1, "", True), err
    assert not (tmp_path / "scores").exists()
