"""What a run has trained of two sequences, and of an encoder, says the same in transformers once it is exported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from data_pipeline.shards.reader import ShardSet, SourceSide
from launcher.cli import main
from launcher.demos.pairs import written_pairs
from longctx.generation import Beams, generate_batch, load_model
from longctx.tokenizer.pair_ids import start_of_targets

REPOSITORY = Path(__file__).parent.parent.parent
SMALL = "--model.hidden_size 32 --model.num_heads 4 --model.num_kv_heads 4 --model.head_dim 8 --model.ffn_size 48"
STEPS = "--train.steps 500 --train.tokens_per_step 512 --train.warmup_steps 5 --train.lr 5e-3 --train.dtype float32"


def trained(folder: Path, *words: str) -> Path:
    """A run of one process, and its export."""
    asked = [*words, *SMALL.split(), *STEPS.split(), "--run.output_dir", f"{folder}/run", "--run.hostfile", "none"]
    command = [sys.executable, "launcher/pretrain.py", *asked, "--validation.rows", "2", "--parallel.context", "1"]
    subprocess.run(command, check=True, cwd=REPOSITORY, timeout=600)
    assert main(["convert", "--to", "hf", f"{folder}/run", f"{folder}/hf"]) == 0
    return folder / "hf"


@pytest.mark.slow
def test_four_beams_write_the_same(tmp_path: Path):
    texts = [texts for _, texts in written_pairs()][:300]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in texts))
    source = ["--source", f"{tmp_path}/pairs.jsonl", "--source-field", "en", "--text-field", "de"]
    assert main(["tokenizer", "train", *source, "--vocab-size", "330", "--output", f"{tmp_path}/t.model"]) == 0
    build = ["data", "build", *source, "--tokenizer", f"{tmp_path}/t.model", "--output", f"{tmp_path}/shards"]
    assert main([*build, "--validation-fraction", "0.1"]) == 0
    layers = "--model.num_layers 2 --model.encoder_layers 2 --model.vocab_size 330 --model.max_positions 128"
    rows = "--data.seq_len 128 --data.source_seq_len 128"
    # Marian scales by the root of its width.
    data = ["--model.preset", "opus-mt", "--model.embedding_scale", str(32**0.5), "--data.train", f"{tmp_path}/shards"]
    folder = trained(tmp_path, *data, *layers.split(), *rows.split())
    held_out = ShardSet.open(tmp_path / "shards/validation")
    tokenizer = held_out.tokenizer()
    sources = [ids.tolist() for ids in SourceSide(held_out).slices([(n, 0, 999) for n in range(12)])]
    model, theirs = load_model(tmp_path / "run"), transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    start, stops = start_of_targets(tokenizer), tokenizer.special.stop_ids
    assert theirs.generation_config.decoder_start_token_id == start
    asked = {"sources": sources, "stop_ids": stops}
    found = dict(generate_batch(model, [[start]] * 12, 40, Beams(num_beams=4, length_penalty=0.6), **asked))
    for number, ids in enumerate(sources):
        options = {"num_beams": 4, "length_penalty": 0.6, "do_sample": False, "max_new_tokens": 40}
        written = theirs.generate(torch.tensor([ids]), **options)[0, 1:].tolist()
        assert written[: len(found[number])] == found[number]
        assert set(written[len(found[number]) :]) <= {theirs.config.pad_token_id}
    assert len(set(map(tuple, found.values()))) > 6, "sources must matter"


@pytest.mark.slow
def test_masks_are_filled_in_by_the_same_five(shards: Path, tmp_path: Path):
    texts = "".join(f"{text['en']}\n\nThen {text['en'].lower()}\n\n" for _, text in list(written_pairs())[:200])
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(texts[number * 2000 : number * 2000 + 8000])
    source = ["--source", str(tmp_path), "--include", "*.txt"]
    train = ["tokenizer", "train", *source, "--kind", "wordpiece", "--vocab-size", "200"]
    assert main([*train, "--output", f"{tmp_path}/t.json"]) == 0
    build = ["data", "build", *source, "--tokenizer", f"{tmp_path}/t.json", "--output", f"{tmp_path}/shards"]
    assert main([*build, "--validation-fraction", "0.3", "--paragraphs"]) == 0
    data = ["--model.preset", "bert-base", "--data.train", f"{tmp_path}/shards", "--data.seq_len", "64"]
    model = "--model.num_layers 2 --model.vocab_size 200 --model.max_positions 64 --model.pair_head nsp"
    objective = "--train.objective masked --validation.sample_tokens 0"
    folder = trained(tmp_path, *data, *model.split(), *objective.split())
    fill = transformers.pipeline("fill-mask", model=str(folder), top_k=5)
    text = "Somebody [MASK] two and [MASK]."
    found = fill(text)
    tokens = torch.tensor([fill.tokenizer(text)["input_ids"]])
    ours = load_model(tmp_path / "run")
    with torch.no_grad():
        logits = ours.logits(ours(tokens, torch.arange(tokens.shape[1])[None]))[0]
    for guesses, place in zip(found, (tokens[0] == fill.tokenizer.mask_token_id).nonzero().flatten(), strict=True):
        assert [guess["token"] for guess in guesses] == logits[place].topk(5).indices.tolist()
