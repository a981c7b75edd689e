"""Tutorial 3 and docs/conversion.md typed as they stand, with miniatures of three published models."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from launcher.cli import main
from launcher.metrics.record import read_metrics
from longctx.generation import load_model
from longctx.tokenizer import load_tokenizer
from tests.docs.pages import ALL_BLOCKS, Block
from tests.helpers import REPOSITORY
from tests.longctx.families import hf_models
from tests.longctx.families.hf_models import CASES
from tests.longctx.tokenizer.families import build

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PAGE_MODEL = "Llama-2-7b-hf"
"""The folder that the pages name."""
OLD, NEW = 64, 256
"""Positions of the miniature, and of its stretched self."""
STD = 0.1
"""Of the weights: attention as sharp as that of trained models."""
SMALL = {
    "model.max_positions": NEW,
    "model.rope.original_max_positions": OLD,
    "model.rope.factor": NEW / OLD,
    "data.seq_len": NEW,
    "train.tokens_per_step": 4 * NEW,
    "train.steps": 4,
    "train.lr": 1e-3,
    "train.warmup_steps": 1,
    "train.dtype": "float32",
    "parallel.context": 2,
    "validation.rows": 2,
    "run.timeout_seconds": 60,
}
"""What the miniature's command has besides the page's."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A published model in small."""

    tokenizer: str
    case: str
    given: str
    """What ``--tokenizer`` is given, of the folder."""


MODELS = {
    "Llama 3": Model("llama3", "llama", "tokenizer.json"),
    "Llama 2": Model("llama2", "llama", "tokenizer.model"),
    "Qwen3-MoE": Model("qwen3", "qwen3_moe", ""),
}


def write_model(model: Model, folder: Path) -> None:
    """The model's Hugging Face folder: random weights, its kind of tokenizer."""
    build(model.tokenizer, folder)
    tokenizer = load_tokenizer(folder)
    ids = {"bos_token_id": tokenizer.special.bos, "eos_token_id": tokenizer.document_end}
    sizes = {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": OLD, **ids}
    case = CASES[model.case]
    hf_models.save(hf_models.build(dataclasses.replace(case, std=STD, values={**case.values, **sizes})), folder)


@pytest.fixture(params=MODELS)
def reader(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """A reader's folder, in which the test stands: the model, long documents and the project's launcher."""
    model = MODELS[request.param]
    write_model(model, tmp_path / PAGE_MODEL)
    documents = tmp_path / "long-documents"
    documents.mkdir()
    files = [p for p in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if 10_000 < p.stat().st_size < 20_000]
    for path in files[:24]:
        (documents / path.name).write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    return model


def first_block(page: str) -> Block:
    """The first block of commands of a page."""
    return next(block for block in ALL_BLOCKS if block.page.name == page)


def follow(words: tuple[str, ...], model: Model) -> None:
    """One command of a page, to a good end; training with the miniature's numbers besides."""
    program, *rest = [word.replace(f"{PAGE_MODEL}/tokenizer.model", f"{PAGE_MODEL}/{model.given}") for word in words]
    assert program == "longctx"
    if rest[0] != "train":
        assert main(rest) == 0, rest
        return
    small = [word for key, value in SMALL.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "launcher", "train", "--ranks", "2", *rest[1:], *small]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"max_positions {OLD} → {NEW}" in ended.stdout
    assert "rope.kind default → yarn" in ended.stdout


def test_both_pages_as_they_stand(reader: Model):
    for words in first_block("3-stretch-a-checkpoint.md").commands:
        follow(words, reader)
    check_trained(Path("runs/extended"))
    check_exported(Path("extended-hf"), Path("runs/extended"))

    Path("runs/demo").symlink_to("extended")
    for words in first_block("conversion.md").commands:
        follow(words, reader)
    check_exported(Path("exported"), Path("runs/extended"))
    check_exported(Path("exported"), Path("imported"))
    for name in ("model.safetensors", "tokenizer.json", "tokenizer.model"):
        if (Path("exported") / name).exists():
            assert (Path("exported") / name).read_bytes() == (Path("extended-hf") / name).read_bytes()

    run_python_of_the_page(reader)


def check_trained(run: Path) -> None:
    """It validated what it was given, then learned."""
    losses = [r["loss"] for r in read_metrics(run) if r["kind"] == "validation"]
    assert len(losses) >= 2
    assert losses[-1] < losses[0]


def check_exported(exported: Path, run: Path) -> None:
    """Transformers gives the ids and logits of our checkpoint, beyond the old length too."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    ours = load_model(run)
    text = (REPOSITORY / "launcher" / "pretrain.py").read_text()
    ids = load_tokenizer(run).encode_prompt(text)
    assert transformers.AutoTokenizer.from_pretrained(exported, split_special_tokens=True)(text)["input_ids"] == ids
    tokens = torch.tensor([ids[:NEW]])
    assert tokens.shape[1] == NEW
    with torch.no_grad():
        mine = ours.logits(ours(tokens, torch.arange(NEW)[None]))
        torch.testing.assert_close(mine, theirs(tokens).logits, rtol=0, atol=1e-5)


def run_python_of_the_page(model: Model) -> None:
    """The page's Python example, in a folder where its output is not there yet."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", (REPOSITORY / "docs" / "conversion.md").read_text(), re.M | re.S)
    Path("exported").rename("exported-before")
    if "tokenizer.model" in code and model.given != "tokenizer.model":
        code = code.replace('"tokenizer.model"', "None")
    else:
        Path("tokenizer.model").write_bytes((Path(PAGE_MODEL) / "tokenizer.model").read_bytes())
    names: dict[str, Any] = {"torch": torch}
    exec(code, names)
    assert names["done"].logits is not None
    assert (Path("again") / "config.json").is_file()
