"""A tiny corpus as shards, and one finished run over two ranks, each made once for the whole session."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest

from data_pipeline.prepare.build import build_shards
from data_pipeline.prepare.sources import open_source
from data_pipeline.prepare.train_tokenizer import train_tokenizer
from tests.launcher.runs import Ended, flags, path_without_ssh, pretrain


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty short files of the standard library as shards with a validation split. Read-only: damage a copy."""
    return build_tiny_shards(tmp_path_factory.mktemp("tiny"))


def build_tiny_shards(place: Path) -> Path:
    """The same, in a folder."""
    folder = place / "corpus"
    folder.mkdir()
    files = [p for p in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if 2_000 < p.stat().st_size < 9_000]
    for path in files[:30]:
        shutil.copyfile(path, folder / path.name)
    source = open_source(folder)
    tokenizer = train_tokenizer(source, place / "tiny.model", vocab_size=512)
    output = place / "shards"
    build_shards(source, tokenizer, output, validation_fraction=0.2, shard_tokens=20_000)
    return output


@pytest.fixture(scope="session")
def finished(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run of ``runs.STEPS`` steps over two ranks by the deepspeed command. Read-only: go on in a copy.

    Where ssh and pdsh fail, and leave a trace beside the run.
    """
    folder = tmp_path_factory.mktemp("finished")
    ended = pretrain(flags(shards, folder / "run"), environment={"PATH": path_without_ssh(folder)})
    assert ended.code == 0, ended.text
    return ended
