"""The verbs with a model that has an encoder, and with one that is one: random weights, made by the verbs
themselves.
"""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.demos.pairs import written_pairs
from longctx.config import PRESETS, ModelConfig
from longctx.conversion import save_hf
from longctx.model.decoder import Decoder
from tests.launcher.cli.calls import refused, succeed
from tests.longctx.samples import randomize

SMALL = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "ffn_size": 48}
SIDES = ["--source-field", "en", "--text-field", "de"]


def checkpoint(folder: Path, config: ModelConfig, tokenizer: Path) -> Path:
    """A checkpoint of random weights, through a Hugging Face folder."""
    model = Decoder(config, seed=None)
    randomize(model, std=0.5, seed=0)
    save_hf(config, model.state_dict(), folder / "hf", tokenizer=tokenizer)
    output = folder / "run/checkpoints/step_000010"
    assert main(["convert", "--from", "hf", str(folder / "hf"), str(output)]) == 0
    return folder / "run"


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of pairs, a tokenizer and a model of both sides."""
    folder = tmp_path_factory.mktemp("pairs")
    texts = [texts for _, texts in written_pairs()][:300]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in texts))
    source, tokenizer = ["--source", f"{folder}/pairs.jsonl", *SIDES], folder / "t.model"
    assert main(["tokenizer", "train", *source, "--vocab-size", "330", "--output", str(tokenizer)]) == 0
    build = ["data", "build", *source, "--tokenizer", str(tokenizer), "--output", f"{folder}/shards"]
    assert main([*build, "--validation-fraction", "0.1"]) == 0
    config = replace(PRESETS["bart-base"], **SMALL, encoder_layers=1, vocab_size=330, max_positions=96)
    checkpoint(folder, config, tokenizer)
    return folder


@pytest.fixture(scope="session")
def bert(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of texts with paragraphs, a WordPiece tokenizer and an encoder with a pair head."""
    folder = tmp_path_factory.mktemp("bert")
    source, tokenizer = ["--source", f"{world}/corpus"], folder / "t.json"
    train = ["tokenizer", "train", *source, "--kind", "wordpiece", "--vocab-size", "500", "--output", str(tokenizer)]
    assert main(train) == 0
    build = ["data", "build", *source, "--tokenizer", str(tokenizer), "--output", f"{folder}/shards", "--paragraphs"]
    assert main([*build, "--validation-fraction", "0.3"]) == 0
    config = replace(PRESETS["bert-base"], **SMALL, vocab_size=500, max_positions=64, pair_head="nsp")
    checkpoint(folder, config, tokenizer)
    return folder


def test_pairs_are_translated_scored_and_kept(capsys, pairs, tmp_path):
    pytest.importorskip("sacrebleu")
    words = ["--checkpoint", pairs / "run", "--tasks", "translation", "--pairs", pairs / "shards/validation"]
    asked = ["evaluate", *words, "--samples", "3", "--answer-tokens", "12", "--output", tmp_path, "--json"]
    scores = json.loads(succeed(capsys, *asked))
    assert scores["pairs"] == 3
    assert 0 <= scores["bleu"]["score"] <= 100
    assert "tok:13a" in scores["bleu"]["signature"]
    rows = [json.loads(line) for line in (tmp_path / "translation.jsonl").read_text().splitlines()]
    assert [set(row) for row in rows] == [{"source", "reference", "written"}] * 3
    assert rows[0]["source"].startswith("Somebody added")
    assert rows[0]["reference"].startswith("Jemand hat")


def test_a_prompt_is_the_source_of_what_is_written(capsys, pairs):
    words = ["generate", "--checkpoint", pairs / "run", "--max-new-tokens", "60", "--temperature", "1", "--prompt"]
    one, other = (succeed(capsys, *words, text) for text in ("Somebody added one and two.", "Nothing at all"))
    assert one != other
    assert "Somebody" not in one


def test_cross_attention_is_drawn_target_against_source(capsys, pairs, tmp_path):
    text = tmp_path / "text"
    text.write_text("Somebody added five and six.\n")
    words = ["attention", "--checkpoint", pairs / "run", "--layer", "1", "--head", "2", "--output", tmp_path]
    out = succeed(capsys, *words, "--cross", "--text", text)
    assert [Path(line).suffix for line in out.splitlines()] == [".svg", ".csv"]
    sums: dict[str, float] = {}
    for row in csv.DictReader((tmp_path / "cross_attention_layer1_head2.csv").read_text().splitlines()):
        sums[row["target"]] = sums.get(row["target"], 0.0) + float(row["share"])
    assert list(sums.values()) == pytest.approx([1.0] * len(sums), abs=1e-5)
    assert "layer" in refused(capsys, 2, *words[:3], "--layer", "2", *words[5:], "--cross", "--text", text)


def test_positions_are_drawn_by_their_values(capsys, pairs, bert, run, tmp_path):
    succeed(capsys, "attention", "--positions", "--checkpoint", bert / "run", "--output", tmp_path, "--length", "10")
    rows = list(csv.DictReader((tmp_path / "positions.csv").read_text().splitlines()))
    assert len(rows) == 10 * SMALL["hidden_size"]
    assert (tmp_path / "positions.svg").is_file()
    words = ["attention", "--positions", "--output", tmp_path, "--checkpoint"]
    assert "position=rope" in refused(capsys, 2, *words, run)
    assert "64 learned positions" in refused(capsys, 2, *words, bert / "run", "--length", "65")
    assert "leave out --text" in refused(capsys, 2, *words, bert / "run", "--layer", "0")
    assert "needs --text" in refused(capsys, 2, "attention", "--output", tmp_path, "--checkpoint", run)


def test_an_encoder_is_asked_for_masked_tokens_and_pairs(capsys, bert, tmp_path):
    words = ["evaluate", "--checkpoint", bert / "run", "--haystack", bert / "shards/validation", "--lengths", "64"]
    scores = json.loads(
        succeed(capsys, *words, "--tasks", "masked,pairs", "--samples", "5", "--output", tmp_path, "--json")
    )
    assert scores == json.loads((tmp_path / "masked.json").read_text())
    assert (scores["rows"], scores["row_tokens"]) == (5, 64)
    assert 0.05 < scores["masked_tokens"] / (5 * 64) < 0.25
    assert scores["loss"] > 5
    assert 0 <= scores["accuracy"] <= 1
    assert scores["pairs"] >= 5
    # The best threshold on these very pairs is right about half of them at least.
    assert 0.5 <= scores["word_overlap_accuracy"] <= 1
    again = json.loads(succeed(capsys, *words, "--tasks", "masked", "--samples", "5", "--output", tmp_path, "--json"))
    assert again == scores


def test_what_a_model_cannot_be_asked_is_said(capsys, pairs, bert, run, world, tmp_path):
    output = ["--output", tmp_path]
    words = ["evaluate", *output, "--tasks", "masked"]
    assert "sees both sides" in refused(capsys, 2, *words, "--checkpoint", run)
    assert "--haystack" in refused(capsys, 2, *words, "--checkpoint", bert / "run")
    assert "do not" in refused(capsys, 2, "evaluate", *output, "--tasks", "masked,niah", "--checkpoint", bert / "run")
    said = refused(capsys, 1, *words, "--checkpoint", bert / "run", "--haystack", pairs / "shards", "--lengths", "64")
    assert "another tokenizer" in said
    said = refused(capsys, 2, *words, "--checkpoint", bert / "run", "--haystack", bert / "shards", "--lengths", "65")
    assert "64 learned positions" in said
    translation = ["evaluate", *output, "--tasks", "translation", "--pairs", pairs / "shards"]
    assert "no encoder" in refused(capsys, 2, *translation, "--checkpoint", run)
    assert "evaluate --tasks masked" in refused(
        capsys, 2, "generate", "--checkpoint", bert / "run", "--prompt", "a", "--max-new-tokens", "1"
    )


def test_both_sides_of_rows_are_shown(capsys, pairs):
    words = ["data", "inspect", pairs / "shards", "--seq-len", "128", "--source-seq-len", "96"]
    assert "pairs" in succeed(capsys, *words)
    shown = succeed(capsys, *words, "--row", "0")
    assert "Somebody added" in shown
    assert "Jemand hat" in shown
