"""The verbs with a model that has an encoder, and with one that is one: random weights, made by the verbs
themselves.
"""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import option_tables
from data_pipeline.shards.reader import ShardSet, SourceSide
from launcher.cli import main
from launcher.demos.pairs import written_pairs
from longctx.config import PRESETS, ModelConfig
from longctx.conversion import save_hf
from longctx.errors import ConfigError
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
    assert "leave out --layer." in refused(capsys, 2, *words, bert / "run", "--layer", "0")
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
    assert "a bidirectional model" in refused(capsys, 2, *words, "--checkpoint", run)
    assert "--haystack" in refused(capsys, 2, *words, "--checkpoint", bert / "run")
    assert "decoder" in refused(capsys, 2, "evaluate", *output, "--tasks", "masked,niah", "--checkpoint", bert / "run")
    said = refused(capsys, 1, *words, "--checkpoint", bert / "run", "--haystack", pairs / "shards", "--lengths", "64")
    assert "different tokenizer" in said
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


def test_pairs_beyond_the_positions_are_left_out_and_counted(capsys, pairs, tmp_path):
    pytest.importorskip("sacrebleu")
    shards = ShardSet.open(pairs / "shards/validation")
    lengths = SourceSide(shards).lengths_of(np.arange(shards.num_documents))
    positions = int(np.median(lengths))
    config = replace(PRESETS["bart-base"], **SMALL, encoder_layers=1, vocab_size=330, max_positions=positions)
    words = ["evaluate", "--tasks", "translation", "--pairs", pairs / "shards/validation", "--answer-tokens", "2"]
    words += ["--checkpoint", checkpoint(tmp_path, config, pairs / "t.model"), "--output", tmp_path / "out"]
    fitting = int((lengths <= positions).sum())
    assert 0 < fitting < len(lengths)
    said = f"left out: {len(lengths) - fitting} of {len(lengths)} pairs"
    assert said in succeed(capsys, *words)
    scores = json.loads((tmp_path / "out/translation.json").read_text())
    assert (scores["pairs"], scores["left_out"]) == (fitting, len(lengths) - fitting)
    assert len((tmp_path / "out/translation.jsonl").read_text().splitlines()) == fitting
    # The first pairs up to one that fits: without that one nothing is left.
    first = int(np.flatnonzero(lengths <= positions)[0])
    scores = json.loads(succeed(capsys, *words, "--samples", first + 1, "--json"))
    assert (scores["pairs"], scores["left_out"]) == (1, first)
    tiny = checkpoint(tmp_path / "tiny", replace(config, max_positions=int(lengths.min()) - 1), pairs / "t.model")
    err = refused(capsys, 2, *words, "--checkpoint", tiny)
    assert f"the shortest has {lengths.min()} tokens" in err
    assert "--pairs FOLDER" in err
    assert "--samples N" in refused(capsys, 2, *words, "--checkpoint", tiny, "--samples", 3)


def test_a_number_of_samples_is_kept_whatever_other_tasks_take_unless_given(capsys, pairs, bert, tmp_path):
    pytest.importorskip("sacrebleu")
    words = ["evaluate", "--output", tmp_path, "--json", "--tasks"]
    translation = ["translation", "--checkpoint", pairs / "run", "--pairs", pairs / "shards", "--answer-tokens", "1"]
    masked = ["masked", "--checkpoint", bert / "run", "--haystack", bert / "shards", "--lengths", "16"]
    assert json.loads(succeed(capsys, *words, *translation, "--samples", 22))["pairs"] == 22
    assert json.loads(succeed(capsys, *words, *translation))["pairs"] > 200
    assert json.loads(succeed(capsys, *words, *masked, "--samples", 22))["rows"] == 22
    assert json.loads(succeed(capsys, *words, *masked))["rows"] == 64


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--samples", "-5"], "--samples -5 must be at least 1"),
        (["--samples", "0"], "--samples 0 must be at least 1"),
        (["--beams", "0"], "--beams 0 must be at least 1"),
        (["--beams", "-3"], "--beams -3 must be at least 1"),
        (["--answer-tokens", "0"], "--answer-tokens 0 must be at least 1"),
        (["--answer-tokens", "-1"], "--answer-tokens -1 must be at least 1"),
        (["--length-penalty", "0.6"], "needs beam search"),
        (["--seed", "42"], "--seed: for tasks with prompts"),
        (["--lengths", "64", "--chat-template", "auto"], "--chat-template: for tasks with prompts"),
        (["--depths", "0,1"], "--depths: for tasks with prompts"),
        (["--haystack", "texts"], "--haystack: for masked, pairs, ppl, longppl, tasks"),
        (["--tokenizer", "t.model"], "--tokenizer: for ppl"),
        (["--beyond-positions"], "--beyond-positions: for masked"),
        (["--longppl-window", "1024"], "--longppl-window: for longppl"),
    ],
)
def test_translation_refuses_numbers_out_of_range_and_what_it_does_not_read(capsys, pairs, tmp_path, options, said):
    pytest.importorskip("sacrebleu")
    words = ["evaluate", "--tasks", "translation", "--checkpoint", pairs / "run", "--output", tmp_path / "out"]
    assert said in refused(capsys, 2, *words, "--pairs", pairs / "shards", *options)
    assert not (tmp_path / "out").exists()


def test_one_penalty_may_be_named_for_several_numbers_of_beams(capsys, pairs, tmp_path):
    pytest.importorskip("sacrebleu")
    words = ["evaluate", "--tasks", "translation", "--checkpoint", pairs / "run", "--output", tmp_path, "--json"]
    words += ["--pairs", pairs / "shards", "--samples", 2, "--answer-tokens", 3, "--length-penalty", "0.6"]
    assert [json.loads(succeed(capsys, *words, "--beams", beams))["beams"] for beams in (1, 2)] == [1, 2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--samples", "0"], "--samples 0 must be at least 1"),
        (["--samples", "-5"], "--samples -5 must be at least 1"),
        (["--lengths", "0"], "--lengths 0: a row needs at least 2 tokens"),
        (["--lengths", "4"], "--lengths 4: a row needs at least 5 tokens, two segments"),
        (["--lengths", ","], "one row length"),
        (["--answer-tokens", "3"], "--answer-tokens: for translation"),
        (["--seed", "42", "--tokenizer", "t.json"], "--seed: for tasks with prompts"),
        (["--chunk-tokens", "16"], "--chunk-tokens: for all tasks but masked and pairs"),
    ],
)
def test_masked_refuses_numbers_out_of_range_and_what_it_does_not_read(capsys, bert, tmp_path, options, said):
    words = ["evaluate", "--tasks", "masked", "--checkpoint", bert / "run", "--output", tmp_path / "out"]
    assert said in refused(capsys, 2, *words, "--haystack", bert / "shards", *options)
    assert not (tmp_path / "out").exists()


def test_rows_may_go_beyond_positions_that_are_no_table(bert, tmp_path):
    from launcher.evaluation.masked_evaluation import MaskedOptions, _loader
    from launcher.evaluation.model_source import open_model
    from parallel.mesh import Mesh

    opened = open_model(bert / "run", None)
    opened = replace(opened, model=replace(opened.model, position="sinusoidal"))
    mesh = Mesh(rank=0, world_size=1, context=1)
    asked = MaskedOptions(checkpoint=bert / "run", output=tmp_path, text=str(bert / "shards"), seq_len=65)
    with pytest.raises(ConfigError, match="or pass --beyond-positions"):
        _loader(asked, opened, mesh)
    assert _loader(replace(asked, beyond_positions=True), opened, mesh).seq_len == 65


def test_tasks_of_a_decoder_refuse_options_of_translation(capsys, run, tmp_path):
    words = ["evaluate", "--checkpoint", run, "--output", tmp_path / "out", "--lengths", "320", "--tasks"]
    assert "--beams: for translation" in refused(capsys, 2, *words, "niah", "--beams", "1")
    assert "translation runs alone" in refused(capsys, 2, *words, "niah,translation")


def test_a_model_that_reads_no_text_by_itself_is_refused_when_it_is_opened(capsys, pairs, bert, tmp_path):
    output = ["--output", tmp_path / "out"]
    ppl = ["evaluate", "--tasks", "ppl,passkey", "--lengths", "16", *output, "--checkpoint"]
    score = ["score", *output, "--checkpoint"]
    for err in (refused(capsys, 2, *ppl, pairs / "run"), refused(capsys, 2, *score, pairs / "run", "--data", "none")):
        assert "model.encoder_layers=1" in err
        assert "`longctx evaluate --tasks translation`" in err
        assert "`longctx generate`" in err
    for err in (refused(capsys, 2, *ppl, bert / "run"), refused(capsys, 2, *score, bert / "run", "--data", "none")):
        assert "`longctx evaluate --tasks masked`" in err
    assert not (tmp_path / "out").exists()


def test_attention_refuses_what_a_picture_does_not_read(capsys, pairs, bert, tmp_path):
    text, long, longer = tmp_path / "text", tmp_path / "long", tmp_path / "longer"
    text.write_text("Somebody added five and six.\n")
    long.write_text("a b c " * 20)
    longer.write_text("a b c " * 99)
    output = ["--output", tmp_path / "out"]
    cross = ["attention", "--cross", "--checkpoint", pairs / "run", *output, "--layer", "1", "--head", "2"]
    err = refused(capsys, 2, *cross, "--text", text, "--length", "3", "--blocks", "2")
    assert "leave out --length and --blocks." in err
    positions = ["attention", "--positions", "--checkpoint", bert / "run", *output]
    assert "leave out --blocks." in refused(capsys, 2, *positions, "--blocks", "96")
    assert "leave out --tokenizer." in refused(capsys, 2, *positions, "--tokenizer", bert / "t.json")
    # Each side by its own name, and by what it may have.
    assert "96 learned positions" in refused(capsys, 2, *cross, "--text", text, "--target", long)
    for file in (long, longer):
        err = refused(capsys, 2, *cross, "--text", text, "--target", file)
        assert f"--target {file}" in err
        assert "Shorten it to 96 tokens" in err
        assert f"--text {file}" in refused(capsys, 2, *cross, "--text", file)
    assert not (tmp_path / "out").exists()


def test_the_help_shows_the_defaults_of_options_that_may_be_left_out():
    from launcher.evaluation.attention_map import AttentionMapOptions
    from launcher.evaluation.evaluation_options import EvaluationOptions, LongPPL
    from launcher.generation.translation import Translation

    defaults = {
        "blocks": AttentionMapOptions.blocks,
        "samples": EvaluationOptions.samples,
        "seed": EvaluationOptions.seed,
        "depths": ",".join(f"{depth:g}" for depth in sorted(EvaluationOptions.depths)),
        "teacher-forced-from": EvaluationOptions.teacher_forced_from,
        "beams": Translation.beams,
        "length-penalty": Translation.length_penalty,
        "longppl-truncation": LongPPL.truncation,
        "longppl-window": LongPPL.window,
    }
    lines = option_tables.table("evaluate").splitlines() + option_tables.table("attention").splitlines()
    for name, default in defaults.items():
        (line,) = [line for line in lines if f"--{name} " in line.split("|")[1]]
        assert f"| `{default}` |" in line
