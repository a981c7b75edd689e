"""Every door of a model whose tokenizer has more ids than the model has rows (Gemma 3; a [PAD] that was added)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from data_pipeline.rows.fim import Fim, FimRule
from data_pipeline.shards.manifest import hash_json
from data_pipeline.shards.reader import ShardSet, open_for_model
from launcher.evaluation.harness.request_encoder import Encoder
from launcher.training.setup import build_run
from launcher.training.trainer import Trainer
from longctx.conversion import export_checkpoint, import_hf
from longctx.errors import DataError
from longctx.tokenizer import load_tokenizer
from longctx.tokenizer.special import FIM_TOKENS
from tests.launcher.cli.calls import call
from tests.launcher.runs import tiny_start
from tests.launcher.workers import leave_out_pictures, run
from tests.longctx.tokenizer.byte_level import SIZE, frame, tokenizer_json, write_model, write_tokenizer

TOKENS = (("[PAD]", SIZE, True), ("<tool>", SIZE + 1, False))
PLAIN = "def main():\n    return 1\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: its padding token and a token for text lie beyond its rows."""
    content = tokenizer_json(*TOKENS, post_processor=frame(begins=True))
    return write_model(tmp_path_factory.mktemp("model") / "hf", content, pad_token="[PAD]")


def write_corpus(folder: Path, *texts: str) -> Path:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    return folder


def build(capsys: pytest.CaptureFixture[str], model: Path, folder: Path, *texts: str, held_out: float = 0) -> Path:
    source = write_corpus(folder / "text", *(f"{number} {text}" for number, text in enumerate(texts)))
    words = ("--source", source, "--tokenizer", model, "--output", folder / "data", "--validation-fraction", held_out)
    assert call(capsys, "data", "build", *words, "--workers", 1)[0] == 0
    return folder / "data"


def rewrite(data: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the entry of each shard in the manifest."""
    manifest = json.loads((data / "manifest.json").read_text())
    for entry in manifest["shards"]:
        change(entry)
    del manifest["hash"]
    (data / "manifest.json").write_text(json.dumps(manifest | {"hash": hash_json(manifest)}))


def test_generation_refuses_a_prompt_with_the_token_and_no_other(capsys, model):
    words = ("generate", "--checkpoint", model, "--max-new-tokens", 2, "--prompt")
    # What spells a special token is text.
    assert call(capsys, *words, f"{PLAIN} [PAD]")[0] == 0
    code, _, err = call(capsys, *words, "a <tool> b")
    assert (code, f"<tool> ({SIZE + 1})" in err, f"rows for ids 0 to {SIZE - 1}" in err) == (2, True, True)


def test_an_evaluation_refuses_a_text_with_the_token_and_no_other(capsys, model, tmp_path):
    words: list[Any] = ["evaluate", "--checkpoint", model, "--tasks", "ppl", "--lengths", 40, "--samples", 1]
    clean, tooled = write_corpus(tmp_path / "clean", PLAIN * 4), write_corpus(tmp_path / "tooled", "<tool>" + PLAIN * 4)
    code, _, err = call(capsys, *words, "--haystack", clean, "--output", tmp_path / "out")
    assert code == 0, err
    code, _, err = call(capsys, *words, "--haystack", tooled, "--output", tmp_path / "refused")
    assert (code, f"holds the token <tool> ({SIZE + 1})" in err) == (1, True)


def test_shards_are_refused_if_the_token_is_in_one(capsys, model, tmp_path):
    (tmp_path / "a").mkdir()
    clean = build(capsys, model, tmp_path / "a", *[PLAIN] * 6)
    assert call(capsys, "data", "verify", clean)[0] == 0
    assert call(capsys, "data", "inspect", clean)[0] == 0
    # What fills rows is an id that the model has, whatever the tokenizer names.
    assert ShardSet.open(clean).padding == SIZE
    assert open_for_model(clean, vocab_size=SIZE).padding == 0
    (tmp_path / "b").mkdir()
    tooled = build(capsys, model, tmp_path / "b", *[PLAIN] * 5, *["<tool>"] * 5)
    assert open_for_model(tooled, vocab_size=SIZE + 2).padding == SIZE
    with pytest.raises(DataError, match=r"00000.arrow holds the token <tool> \(262\), and the model has rows"):
        open_for_model(tooled, vocab_size=SIZE)
    # Losses are taken of shards too.
    words = ["--checkpoint", model, "--tasks", "ppl", "--lengths", 5, "--samples", 10, "--output", tmp_path / "out"]
    code, _, err = call(capsys, "evaluate", *words, "--haystack", tooled)
    assert (code, "holds the token <tool>" in err) == (1, True)


def test_shards_of_an_earlier_release_are_built_again(capsys, model, tmp_path):
    data = build(capsys, model, tmp_path, *[PLAIN] * 4)
    rewrite(data, lambda entry: entry.pop("num_ids"))
    ShardSet.open(data)
    open_for_model(data, vocab_size=SIZE + 2)
    with pytest.raises(DataError, match="Build it again with `longctx data build`"):
        open_for_model(data, vocab_size=SIZE)


def test_a_recorded_id_that_is_not_the_largest_is_found(capsys, model, tmp_path):
    data = build(capsys, model, tmp_path, *["<tool>"] * 4)
    rewrite(data, lambda entry: entry.update(num_ids=5))
    code, out, err = call(capsys, "data", "verify", data)
    assert (code, "has num_ids=5" in out + err) == (1, True)


def test_lm_eval_refuses_a_request_with_the_token_and_no_other(model):
    encoder = Encoder(load_tokenizer(model).for_model(SIZE))
    assert encoder.pair("def", " main").continuation
    with pytest.raises(DataError, match="<tool>"):
        encoder.pair("def", " <tool>")


def test_a_text_without_a_context_is_refused_if_its_begin_has_no_row(tmp_path):
    content = tokenizer_json(("<s>", SIZE, True))
    encoder = Encoder(load_tokenizer(write_model(tmp_path / "hf", content, bos_token="<s>")).for_model(SIZE))
    assert encoder.pair("def", " main").continuation
    for ask in (lambda: encoder.pair("", "main"), lambda: encoder.windows("main", 8), encoder.begin):
        with pytest.raises(DataError, match="<s>"):
            ask()


def test_a_middle_is_not_filled_in_if_its_marks_have_no_rows(tmp_path):
    marks = [(token, SIZE + number, True) for number, token in enumerate(FIM_TOKENS)]
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, tokenizer_json(*marks)))
    rule = FimRule(rate=0.5, spm_rate=0.5, segment_tokens=0)
    assert Fim.of(rule, tokenizer.for_model(SIZE + 3), seed=0, seq_len=64)
    with pytest.raises(DataError, match=rf"data.fim_rate\) holds the token <\|fim_prefix\|> \({SIZE}\)"):
        Fim.of(rule, tokenizer.for_model(SIZE), seed=0, seq_len=64)


@pytest.mark.parametrize("named", [SIZE, 9999])
def test_transformers_loads_what_is_exported(model, tmp_path, caplog, named):
    """It refuses a padding id without a row, which it wrote itself when the token was added."""
    content = tokenizer_json(*TOKENS)
    source = write_model(tmp_path / "hf", content, ids={"pad_token_id": named}, pad_token="[PAD]")
    with pytest.raises(AssertionError, match="Padding_idx"):
        AutoModelForCausalLM.from_pretrained(str(source), local_files_only=True)
    done = import_hf(source, tmp_path / "in", verify="auto")
    assert done.logits_skip_reason is not None
    assert f"pad_token_id={named}" in done.logits_skip_reason
    done = export_checkpoint(tmp_path / "in", tmp_path / "out", verify="logits")
    assert done.logits is not None
    assert f"config.json gets pad_token_id=null instead of {named}" in caplog.text
    # The same for a tokenizer that is asked for.
    done = export_checkpoint(tmp_path / "in", tmp_path / "other", tokenizer=model, verify="logits")
    assert done.logits is not None


def test_several_begin_ids_become_one_in_an_export(tmp_path, caplog):
    source = write_model(tmp_path / "hf", tokenizer_json(), ids={"bos_token_id": [0, 3], "eos_token_id": [1, 5]})
    done = import_hf(source, tmp_path / "in", verify="auto")
    assert "bos_token_id=[0, 3]" in (done.logits_skip_reason or "")
    assert export_checkpoint(tmp_path / "in", tmp_path / "out", verify="logits").logits is not None
    assert "config.json gets bos_token_id=0 instead of [0, 3]" in caplog.text
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == (0, [1, 5])


def train_from(shards: Path, source: Path, output: Path) -> None:
    leave_out_pictures()
    once = {"train.steps": 1, "train.warmup_steps": 0, "train.lr": 1e-4, "validation.rows": 2, "data.seq_len": 64}
    once |= {"run.start_from": source, "train.tokens_per_step": 128, "validation.sample_prompt": "def"}
    Trainer(build_run(tiny_start(shards, output, once), torch.device("cpu"))).train()


@pytest.mark.slow
def test_a_run_starts_from_it_and_its_export_loads(capsys, model, tmp_path):
    """Rows end in padding, whose id the model does not have."""
    data = build(capsys, model, tmp_path, *[PLAIN] * 24, held_out=0.3)
    run(train_from, 2, data, model, tmp_path / "run")
    log = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert "Texts with these tokens are rejected: <tool> (262)" in log
    assert export_checkpoint(tmp_path / "run", tmp_path / "out", verify="logits").logits is not None
    assert call(capsys, "generate", "--checkpoint", tmp_path / "run", "--prompt", "def", "--max-new-tokens", 2)[0] == 0
