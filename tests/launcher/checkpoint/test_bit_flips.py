"""One flipped bit, anywhere in any file of a checkpoint or a shard folder: found, and the file is named."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from data_pipeline.inspect import find_problems as verify_shards
from launcher.checkpoint.resume import find_resume
from longctx.checkpoint_format import MANIFEST, CheckpointReader, list_checkpoints
from longctx.errors import CheckpointError

FLIPS = [20, pytest.param(200, marks=pytest.mark.slow)]


def flip(path: Path, place: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ (1 << bit)]))


def drawn(folder: Path, count: int, seed: int) -> list[tuple[Path, int, int]]:
    """Files, bytes and bits: every file at least once, then as often as it is large."""
    draw = random.Random(seed)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    files = [path for path in files if path.stat().st_size]
    chosen = [*files, *draw.choices(files, [path.stat().st_size for path in files], k=count)][: max(count, len(files))]
    return [(path, draw.randrange(path.stat().st_size), draw.randrange(8)) for path in chosen]


def problems_of(folder: Path) -> list[str]:
    try:
        return CheckpointReader(folder).verify()
    except CheckpointError as error:
        return [str(error)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", FLIPS)
def test_in_a_checkpoint(finished, tmp_path: Path, count: int):
    newest = list_checkpoints(finished.folder)[-1]
    folder = Path(shutil.copytree(newest, tmp_path / "run/checkpoints" / newest.name))
    meant = json.loads((folder / MANIFEST).read_bytes())
    flips = drawn(folder, count, seed=count)
    assert {path.name for path, _, _ in flips} == {path.name for path in folder.iterdir()}
    for path, place, bit in flips:
        flip(path, place, bit)
        problems = problems_of(folder)
        if not problems:
            # 1e-05 and 1E-05 are one number: the one flip that changes nothing.
            assert path.name == MANIFEST
            assert json.loads(path.read_bytes()) == meant
        assert not problems or any(path.name in problem for problem in problems), (path, place, bit)
        if problems:
            with pytest.raises(CheckpointError, match="can be resumed"):
                find_resume(tmp_path / "run", "newest-good")
        flip(path, place, bit)
    assert problems_of(folder) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", FLIPS)
def test_in_a_shard_folder(shards: Path, tmp_path: Path, count: int):
    """Also in the tokenizer, and in what is held out."""
    folder = Path(shutil.copytree(shards, tmp_path / "shards"))
    flips = drawn(folder, count, seed=count)
    assert {".arrow", ".sums", ".json"} <= {path.suffix for path, _, _ in flips}
    for path, place, bit in flips:
        flip(path, place, bit)
        problems = verify_shards(folder)
        named = (str(path), "tokenizer") if "tokenizer" in path.name else (str(path),)
        assert any(name in problem for problem in problems for name in named), (path, place, bit, problems)
        flip(path, place, bit)
    assert verify_shards(folder) == []
