"""The whole trip of a public model: taken as it lies on the disk, trained on its own data, and out again.

Twelve miniatures with the families' own tokenizer settings; each step by the command that a user types, but for the
launcher: forked ranks train all twelve, one after the other.
"""

from __future__ import annotations

import dataclasses
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from launcher.cli import main
from launcher.metrics.record import read_metrics
from launcher.training.setup import build_run
from launcher.training.trainer import Trainer
from longctx.generation import load_model
from longctx.tokenizer import load_tokenizer
from longctx.tokenizer.hard_texts import HARD_TEXTS
from longctx.tokenizer.text_chunks import SPACE_MARK
from tests.helpers import run_distributed
from tests.launcher.runs import tiny_start
from tests.launcher.workers import leave_out_pictures
from tests.longctx.families import hf_models
from tests.longctx.families.hf_models import CASES
from tests.longctx.tokenizer.families import FAMILIES, build

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 3
RANKS = 2
MODELS = {
    "llama2": "llama",
    "llama3": "llama llama3",
    "mistral": "mistral",
    "tekken": "mistral full",
    "qwen3": "qwen3_moe",
    "gpt2": "gpt2",
    "deepseek": "deepseek_v3",
    "olmoe": "olmoe",
    "gpt_oss": "gpt_oss",
    "gemma": "gemma2",
    "t5": "llama with biases",
    "own": "qwen3",
}
"""The model behind each tokenizer, of ``hf_models.CASES``."""
TRAINING = {
    "data.seq_len": 64,
    "train.steps": STEPS,
    "train.lr": 1e-3,
    "train.tokens_per_step": 256,
    "checkpoint.every_steps": 0,
    "validation.every_steps": STEPS,
    "validation.rows": 2,
}
STD = 0.1
"""Of the weights: attention as sharp as that of trained models."""
PROMPT = "def main("
NEW_TOKENS = 8


class Trip:
    """Where a family's model lies at each station."""

    def __init__(self, folder: Path) -> None:
        self.given = folder / "given"
        """The Hugging Face folder that the user has."""
        self.shards = folder / "shards"
        """The corpus in the ids of that folder's tokenizer."""
        self.run = folder / "run"
        """The run that started from it."""
        self.exported = folder / "exported"
        """The Hugging Face folder of the trained model."""


def write_model(family: str, folder: Path) -> None:
    """Random weights as transformers saves them, and the tokenizer's files beside them."""
    build(family, folder)
    special = load_tokenizer(folder).special
    case = CASES[MODELS[family]]
    sizes = {
        "vocab_size": load_tokenizer(folder).vocab_size,
        "bos_token_id": special.bos,
        "eos_token_id": load_tokenizer(folder).document_end,
    }
    hf_models.save(hf_models.build(dataclasses.replace(case, std=STD, values={**case.values, **sizes})), folder)


def write_corpus(folder: Path) -> Path:
    """Some files of the standard library, and texts that are awkward for tokenizers."""
    folder.mkdir()
    files = [p for p in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if 2_000 < p.stat().st_size < 9_000]
    for path in files[:8]:
        shutil.copyfile(path, folder / path.name)
    (folder / "hard.txt").write_text("\n".join(HARD_TEXTS), newline="")
    return folder


def train_each(trips: Mapping[str, Trip]) -> None:
    leave_out_pictures()
    for trip in trips.values():
        config = tiny_start(trip.shards, trip.run, {**TRAINING, "run.start_from": trip.given})
        Trainer(build_run(config, torch.device("cpu"))).train()


@pytest.fixture(scope="module")
def trips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trip]:
    """Every family's model, given, trained and exported."""
    base = tmp_path_factory.mktemp("trips")
    corpus = write_corpus(base / "corpus")
    trips = {family: Trip(base / family) for family in FAMILIES}
    for family, trip in trips.items():
        write_model(family, trip.given)
        command = ["data", "build", "--source", corpus, "--tokenizer", trip.given, "--output", trip.shards]
        succeed(*command, "--validation-fraction", 0.2)
    run_distributed(train_each, RANKS, trips, timeout=300.0)
    for trip in trips.values():
        succeed("convert", "--to", "hf", trip.run, trip.exported)
    return trips


def succeed(*words: object) -> None:
    """The command, to a good end."""
    assert main([str(word) for word in words]) == 0, words


def loaded(folder: Path) -> tuple[Any, Any]:
    """What transformers makes of a folder: tokenizer and model."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, split_special_tokens=True
    )
    tokenizer.model_max_length = 2**60
    return tokenizer, transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def trip(trips: dict[str, Trip], family: str) -> Trip:
    return trips[family]


def test_it_trains(trip: Trip):
    records = read_metrics(trip.run)
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(1, STEPS + 1))
    given, trained = (r["loss"] for r in records if r["kind"] == "validation")
    assert trained < given


def test_the_tokenizers_files_come_out_byte_for_byte(trip: Trip):
    names = {path.name for path in trip.given.iterdir() if "token" in path.name}
    assert names
    for name in names:
        assert (trip.exported / name).read_bytes() == (trip.given / name).read_bytes(), name


def test_transformers_gives_the_same_ids(trip: Trip, family: str):
    ours = load_tokenizer(trip.run)
    theirs, _ = loaded(trip.exported)
    for text in texts(family):
        wanted = theirs(text, add_special_tokens=False)["input_ids"]
        # A Unigram of transformers takes a special token's own piece for its spelling; here text is never a control id.
        if family != "t5" or not set(wanted) & set(theirs.all_special_ids) - {theirs.unk_token_id}:
            assert ours.encode(text).tolist() == wanted, text
    prompt = theirs(PROMPT)["input_ids"]
    if family == "t5":
        prompt.pop()  # an end, which a prompt must not have
    assert ours.encode_prompt(PROMPT) == prompt


def texts(family: str) -> list[str]:
    """Awkward texts, without those that transformers 5 reads otherwise than SentencePiece and the model's own files."""
    if family in ("llama2", "mistral"):
        return [text for text in HARD_TEXTS if not text.startswith((" ", SPACE_MARK))]
    return list(HARD_TEXTS)


def test_transformers_computes_the_same_logits(trip: Trip):
    ours, (_, theirs) = load_model(trip.run), loaded(trip.exported)
    ids = torch.tensor([load_tokenizer(trip.run).encode_prompt(PROMPT * 4)[:40]])
    with torch.no_grad():
        mine = ours.logits(ours(ids, torch.arange(ids.shape[1])[None]))
        wanted = theirs(ids).logits
    # Two float32 passes of the same products in other orders; GPT-OSS and DeepSeek are measured in test_transformers.
    torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-5)
    assert mine.std() > 1e-3, "logits that say something"


def test_the_weights_are_no_longer_those_that_came(trip: Trip):
    before, after = hf_models.on_disk(trip.given), hf_models.on_disk(trip.exported)
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name].float(), after[name].float()) for name in before)


def test_generate_writes_what_transformers_writes(trip: Trip, capsys: pytest.CaptureFixture[str]):
    own = load_tokenizer(trip.run)
    ids = own.encode_prompt(PROMPT)
    with torch.no_grad():
        _, model = loaded(trip.exported)
        wanted = model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)[0]
    continuation = [token for token in wanted.tolist() if token not in own.special.stop_ids]
    text = own.decode(continuation).removeprefix(own.decode(ids))
    for folder in (trip.run, trip.exported):
        capsys.readouterr()
        succeed("generate", "--checkpoint", folder, "--prompt", PROMPT, "--max-new-tokens", NEW_TOKENS)
        assert capsys.readouterr().out == text + "\n"
