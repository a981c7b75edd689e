"""Files of the newest checkpoint and of the data are damaged: refused by name, and the run goes on from good ones."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from longctx.checkpoint_format import CHECKPOINTS, MANIFEST
from tests.launcher.checkpoint.test_bit_flips import flip
from tests.launcher.faults.scene import Scene
from tests.launcher.test_accidents import Accident, Place

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RANK_FILE = "rank_00001.safetensors"
PAGE = 4096


@pytest.fixture(scope="module")
def struck(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed behind its fifth step, with checkpoints of the second and the fourth."""
    scene = Scene(shards, Path(), tmp_path_factory.mktemp("struck"), None)  # type: ignore[arg-type]
    place = Place("step", "launcher.training.train_step", "TrainStep.forward_backward")
    scene.strike(Accident(rank=1, place=place, kind="SIGKILL", ranks=2, step=6), {"checkpoint.wait": True})
    return scene.run


class Harmless:
    """What a stranger's pickle would do when it is read."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return Path.touch, (Path("executed"),)  # type: ignore[return-value]


def flip_a_bit(path: Path) -> None:
    flip(path, path.stat().st_size // 2, 3)


def zero_a_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    # One that holds values, as a disk gives back a block that it has lost.
    place = next(at for at in range(PAGE, len(data) - PAGE, PAGE) if any(data[at : at + PAGE]))
    data[place : place + PAGE] = bytes(PAGE)
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


def put_another_step_in_its_place(path: Path) -> None:
    shutil.copy(path.parent.with_name("step_000002") / path.name, path)


def put_a_pickle_in_its_place(path: Path) -> None:
    path.write_bytes(pickle.dumps(Harmless()))


DAMAGES = {
    "a flipped bit": (RANK_FILE, flip_a_bit, RANK_FILE),
    "a page of zeros": (RANK_FILE, zero_a_page, RANK_FILE),
    "a truncated file": (RANK_FILE, truncate, RANK_FILE),
    "an empty file": (RANK_FILE, empty, RANK_FILE),
    "a missing file": (RANK_FILE, remove, RANK_FILE),
    "a file of another checkpoint": (RANK_FILE, put_another_step_in_its_place, RANK_FILE),
    "a stranger's pickle": (RANK_FILE, put_a_pickle_in_its_place, RANK_FILE),
    "a flipped bit in the manifest": (MANIFEST, flip_a_bit, MANIFEST),
    "an empty manifest": (MANIFEST, empty, MANIFEST),
    "a flipped bit in the tokenizer": ("tokenizer.model", flip_a_bit, "tokenizer.model"),
}
"""By name: the file, what befalls it, and what the verdict must name."""


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint(scene: Scene, struck: Path, damage: str):
    name, act, named = DAMAGES[damage]
    shutil.copytree(struck, scene.run)
    act(scene.run / CHECKPOINTS / "step_000004" / name)
    seen, seconds = scene.refused(named, 1, {"run.resume": "latest"})
    assert not Path("executed").exists()
    scene.record(
        "files",
        f"checkpoint: {damage}",
        injected=f"{name} of the newest checkpoint; resumed from latest, then from newest-good",
        seen=seen,
        seconds=seconds,
        recovered=scene.recover("newest-good"),
    )


def damaged_data(shards: Path, folder: Path, act: Callable[[Path], None]) -> Path:
    copy = Path(shutil.copytree(shards, folder / "damaged"))
    act(copy / "00000.arrow")
    return copy


@pytest.mark.parametrize(
    ("damage", "act"),
    [("a flipped bit", flip_a_bit), ("a truncated file", truncate), ("a missing file", remove)],
)
def test_a_damaged_shard(scene: Scene, shards: Path, struck: Path, damage: str, act: Callable[[Path], None]):
    """Of a run that goes on: the shards are those that the checkpoint knows, but for the damage."""
    shutil.copytree(struck, scene.run)
    data = damaged_data(shards, scene.folder, act)
    scene.names[data] = "DATA"
    seen, seconds = scene.refused("00000.arrow", 1, {"run.resume": "latest", "data.train": data})
    scene.record("files", f"data: {damage}", injected="in a shard, before a start", seen=seen, seconds=seconds)
