"""A small world that the verbs make themselves: a corpus, a tokenizer, shards, a Hugging Face folder and a run."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest

from launcher.cli import main
from tests.launcher.cli.calls import VOCAB_SIZE


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, a tokenizer, shards, a Hugging Face folder and a run. Read-only: damage copies."""
    folder = tmp_path_factory.mktemp("world")
    stdlib = Path(sysconfig.get_path("stdlib"))
    (folder / "corpus").mkdir()
    for path in [path for path in sorted(stdlib.glob("*.py")) if 2_000 < path.stat().st_size < 12_000][:24]:
        shutil.copyfile(path, folder / "corpus" / path.name)
    tokenizer = train_tokenizer(folder, folder / "tokenizer.model", VOCAB_SIZE)
    options = ["--validation-fraction", "0.3", "--shard-tokens", "20000", "--output", f"{folder}/data"]
    assert main(["data", "build", "--source", f"{folder}/corpus", "--tokenizer", str(tokenizer), *options]) == 0
    return folder


def train_tokenizer(world: Path, path: Path, vocab_size: int) -> Path:
    words = ["--source", str(world / "corpus"), "--vocab-size", str(vocab_size), "--output", str(path)]
    assert main(["tokenizer", "train", *words]) == 0
    return path


@pytest.fixture(scope="session")
def small_tokenizer(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another tokenizer than the run's, with fewer ids, so that their number says nothing."""
    return train_tokenizer(world, tmp_path_factory.mktemp("small") / "small.model", 500)


@pytest.fixture(scope="session")
def run(world: Path) -> Path:
    """A run folder with checkpoints of two steps: a random model, through a Hugging Face folder of its own."""
    import torch

    from longctx.conversion import save_hf
    from longctx.model.decoder import Decoder
    from tests.longctx.samples import randomize, tiny_config

    torch.set_num_threads(1)
    model = Decoder(tiny_config(vocab_size=VOCAB_SIZE), seed=None)
    randomize(model, std=0.15, seed=0)
    save_hf(model.config, model.state_dict(), world / "hf", tokenizer=world / "tokenizer.model")
    for step in (20, 100):
        output = world / f"run/checkpoints/step_{step:06d}"
        assert main(["convert", "--from", "hf", str(world / "hf"), str(output)]) == 0
    return world / "run"


@pytest.fixture
def damaged_run(run: Path, tmp_path: Path) -> Path:
    """A copy of ``run`` to break."""
    return Path(shutil.copytree(run, tmp_path / "run"))
