"""Sample text at validations: the text that one process writes from the same weights, on any mesh."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.metrics.record import read_metrics
from longctx.generation import load_model
from longctx.tokenizer import load_tokenizer
from tests.launcher.workers import run, train_each
from tests.longctx.cached_models import without_cache

pytestmark = pytest.mark.timeout(300)

PROMPT = "def main(x):\n"
COMMON = {
    "train.steps": 1,
    "train.lr": 0.05,
    "train.warmup_steps": 0,
    "validation.rows": 2,
    "validation.every_steps": 1,
    "validation.sample_tokens": 6,
    "validation.sample_prompt": PROMPT,
}
MESHES = {
    "zigzag": {"parallel.context": 2, "parallel.layout": "zigzag", "zero.stage": 3},
    "experts": {"parallel.context": 1, "parallel.expert": 2, "zero.stage": 2},
    "without": {"parallel.context": 2, "parallel.layout": "zigzag", "zero.stage": 3, "validation.sample_tokens": 0},
}


@pytest.fixture(scope="module")
def base(shards, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    run(train_each, 2, shards, {folder / name: {**COMMON, **mesh} for name, mesh in MESHES.items()})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zigzag", "experts"])
def test_the_sample_is_the_greedy_continuation_by_one_process(base, name):
    tokenizer, model = load_tokenizer(base / name), load_model(base / name)
    prompt = tokenizer.encode_prompt(PROMPT)
    ids = without_cache(model, prompt, 6, stop_ids=tokenizer.special.stop_ids)
    validations = [record for record in read_metrics(base / name) if record["kind"] == "validation"]
    assert [record["step"] for record in validations] == [1]
    text = tokenizer.decode([*prompt, *ids])[len(tokenizer.decode(prompt)) :]
    assert validations[-1]["sample"] == {"prompt": PROMPT, "text": text}
    assert text


def test_no_sample_is_written_unasked_and_nothing_else_changes(base):
    def losses(name: str) -> list[float]:
        return [record["loss"] for record in read_metrics(base / name) if record["kind"] == "validation"]

    assert all("sample" not in record for record in read_metrics(base / "without"))
    assert losses("zigzag") == losses("without")


def test_bits_a_byte_are_the_loss_over_the_bytes_of_text(base, shards):
    import json
    import math

    manifest = json.loads((shards / "validation" / "manifest.json").read_text())
    record = next(record for record in read_metrics(base / "without") if record["kind"] == "validation")
    wanted = record["loss"] / math.log(2) * manifest["tokens"] / manifest["text_bytes"]
    assert record["bits_per_byte"] == pytest.approx(wanted)
