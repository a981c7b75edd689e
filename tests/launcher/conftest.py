"""A tiny corpus as shards, and one finished run over two ranks, each made once, whichever worker of xdist needs it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.sources import open_source
from data_pipeline.prepare.train_tokenizer import train_tokenizer
from tests.launcher.runs import Ended, flags, path_without_ssh, pretrain


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that ``make`` has filled, the same one for all workers of a session."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        folder = factory.mktemp(name)
        make(folder)
        return folder
    # Workers have folders of their own in the session's.
    folder = factory.getbasetemp().parent / name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / "done"
        if not done.exists():
            # Where another worker failed to make it, this one says why too.
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty short files of the standard library as shards with a validation split. Read-only: damage a copy."""
    return made_once(tmp_path_factory, "tiny", build_tiny_shards) / "shards"


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

    def run(folder: Path) -> None:
        ended = pretrain(flags(shards, folder / "run"), environment={"PATH": path_without_ssh(folder)})
        assert ended.code == 0, ended.text
        (folder / "ended.json").write_text(json.dumps(asdict(ended), default=str))

    ended = json.loads((made_once(tmp_path_factory, "finished", run) / "ended.json").read_text())
    return Ended(**{**ended, "folder": Path(ended["folder"])})


@pytest.fixture
def _own_handlers() -> Iterator[None]:
    """Give the loggers back their handlers."""
    names = ["launcher", "parallel", "data_pipeline", "longctx", "__main__"]
    before = {name: (logging.getLogger(name).handlers, logging.getLogger(name).propagate) for name in names}
    said = logging.raiseExceptions
    yield
    logging.raiseExceptions = said
    for name, (handlers, propagate) in before.items():
        logging.getLogger(name).handlers, logging.getLogger(name).propagate = handlers, propagate
