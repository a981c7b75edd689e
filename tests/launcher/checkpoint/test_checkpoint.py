"""Checkpoints: any stage and world writes and reads them, damage is found, and no accident costs the last good one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from launcher.checkpoint.resume import find_resume
from launcher.metrics.record import DISCARDED_FILE, read_metrics, readable_records
from longctx.checkpoint_format import CHECKPOINTS, MANIFEST, CheckpointReader, list_checkpoints
from tests.launcher.cli.calls import flip_a_byte
from tests.launcher.runs import STEPS
from tests.launcher.workers import (
    build_undrawn,
    end_guarded,
    refuse_each,
    rows,
    run,
    train,
    train_until_killed_in_a_resume,
    train_until_killed_in_a_save,
    train_until_killed_in_a_step,
)

pytestmark = pytest.mark.timeout(300)
DENSE = {"model.num_experts": 0, "model.shared_ffn_size": 0, "model.ffn_size": 48}
SHORT = {"train.steps": 4, "validation.rows": 0}

Written = tuple[str, str, int, int]
"""What a checkpoint was written with: kind of model, dtype (and what it is multiplied in), ZeRO stage, ranks."""

PLAIN: Written = ("moe", "float32", 1, 2)
PAIRS: list[tuple[Written, tuple[int, int]]] = [
    (PLAIN, (3, 1)),
    (("moe", "float32", 3, 2), (2, 4)),
    (("dense", "float32", 2, 2), (0, 2)),
]
"""What wrote, and the stage and ranks that read."""
MORE_PAIRS: list[tuple[Written, tuple[int, int]]] = [
    (PLAIN, (1, 2)),
    (("moe", "bfloat16 in float32", 2, 2), (3, 2)),
    (("moe", "bfloat16", 2, 2), (3, 2)),
    (("moe", "float32", 3, 2), (3, 2)),
    (("dense", "float32", 0, 1), (1, 2)),
    (("moe", "bfloat16", 2, 2), (2, 2)),
    (("moe", "bfloat16 in float32", 2, 2), (2, 2)),
]
"""The same, tried where slow tests are."""

KILLS: dict[str, tuple[Any, ...]] = {
    "while a rank has written its pieces": (train_until_killed_in_a_save, 1, "read_back rank_00001.safetensors"),
}
"""Accidents: what is run, and where it is killed."""
MORE_KILLS: dict[str, tuple[Any, ...]] = {
    "in the middle of a step": (train_until_killed_in_a_step, 0, 6),
    "in the middle of a resume": (train_until_killed_in_a_resume, 4),
    "before anything is copied": (train_until_killed_in_a_save, 1, "fill"),
    "before a rank writes its pieces": (train_until_killed_in_a_save, 1, "write_pieces"),
    "before the commit": (train_until_killed_in_a_save, 0, "commit"),
    "before the tokenizer is written": (train_until_killed_in_a_save, 0, "_write_extra_file"),
    "before the rename": (train_until_killed_in_a_save, 0, f"sync_path {MANIFEST}"),
    "after the rename": (train_until_killed_in_a_save, 0, f"sync_path {CHECKPOINTS}"),
    "before the proof": (train_until_killed_in_a_save, 0, "write_proof"),
    "before older ones go": (train_until_killed_in_a_save, 0, "prune"),
}
"""The same, tried where slow tests are."""
AFTER_THE_RENAME = ("in the middle of a resume", "after the rename", "before the proof")
BEFORE_THE_RENAME = [
    name for name in KILLS | MORE_KILLS if (KILLS | MORE_KILLS)[name][0] is train_until_killed_in_a_save
]
BEFORE_THE_RENAME = [name for name in BEFORE_THE_RENAME if name not in (*AFTER_THE_RENAME, "before older ones go")]
STEPS_LOST = ("in the middle of a step", "in the middle of a resume", "while a rank has written its pieces")
"""Accidents that come at a step that no checkpoint has."""
EVERY_PAIR = [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in MORE_PAIRS)]
EVERY_KILL = [*KILLS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_KILLS)]


def settings(kind: str, dtype: str, stage: int, world: int) -> dict[str, Any]:
    model = DENSE if kind == "dense" else {}
    dtype, _, products = dtype.partition(" in ")
    way = {"train.dtype": dtype, "train.products": products or "native"}
    return {**SHORT, **model, **way, "zero.stage": stage, "parallel.context": min(world, 2)}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Where this module's runs lie."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def written(shards, base) -> Callable[[Written], Path]:
    """A run with checkpoints at steps 2 and 4, for a way of writing."""

    @cache
    def write(source: Written) -> Path:
        folder = base / "_".join(map(str, source))
        run(train, source[3], shards, folder, settings(*source))
        return folder

    return write


@pytest.fixture(scope="module")
def unbroken(shards, base) -> Path:
    """A run of all steps over two ranks that nothing befell."""
    run(train, 2, shards, base / "unbroken", {})
    return base / "unbroken"


@pytest.fixture(scope="module")
def killed(shards, base) -> Callable[[str], Path]:
    """What an accident left behind."""

    @cache
    def kill(name: str) -> Path:
        folder = base / name.replace(" ", "_")
        function, *where = (KILLS | MORE_KILLS)[name]
        with pytest.raises(AssertionError):
            run(function, 2, shards, folder, {}, *where)
        return folder

    return kill


@pytest.fixture(scope="module")
def gone_on(shards, killed) -> Callable[[str], Path]:
    """What became of it when it went on."""

    @cache
    def resume(name: str) -> Path:
        left = killed(name)
        folder = Path(shutil.copytree(left, left.with_name(f"{left.name}_resumed")))
        run(train, 2, shards, folder, {"run.resume": "latest"})
        return folder

    return resume


@pytest.fixture
def copied(written, tmp_path) -> Path:
    """A copy of a finished run, to damage and to go on in."""
    return Path(shutil.copytree(written(PLAIN), tmp_path / "run"))


# Written here, read there.


@pytest.mark.few(1)
@pytest.mark.parametrize(("source", "target"), EVERY_PAIR, ids=str)
def test_any_stage_and_world_goes_on_from_what_another_wrote(shards, written, source, target, tmp_path):
    resume = {"run.resume": written(source) / CHECKPOINTS / "step_000002"}
    run(train, target[1], shards, tmp_path, {**settings(*source[:2], *target), **resume})
    wanted, got = rows(written(source)), rows(tmp_path)
    assert [r["step"] for r in got] == [3, 4]
    if source[2:] == target:
        assert got == wanted[2:]
        return
    # The first loss shows the weights, the second the moments: its update was computed in another order of sums.
    # Stage 3 has linear layers of its own, which round once more in bfloat16: less than 1 % of the logits, and the
    # logits are a tenth of the loss's six nats at most. Over the 512 targets errors fall to either side.
    bounds = (1e-6, 1e-5) if source[1] == "float32" else (1e-4, 1e-3)
    for mine, theirs, bound in zip(got, wanted[2:], bounds, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=bound)
        assert mine["tokens"] == theirs["tokens"]


def test_what_a_checkpoint_says_of_itself(written):
    folder = written(PLAIN) / CHECKPOINTS / "step_000004"
    reader = CheckpointReader(folder)
    assert (reader.step, str(reader.dtype), reader.verify()) == (4, "torch.float32", [])
    training = reader.manifest["training"]
    assert (training["world_size"], training["zero_stage"], training["loader"]["rows_consumed"]) == (2, 1, 8)
    assert {p.name for p in folder.iterdir()} == {MANIFEST, *reader.manifest["files"]}
    assert (folder / "tokenizer.model").read_bytes()


# Damage.


def flip_a_byte_of_a_piece(checkpoint: Path) -> str:
    flip_a_byte(checkpoint / "rank_00001.safetensors")
    return "rank_00001.safetensors"


def truncate(checkpoint: Path) -> str:
    path = checkpoint / "rank_00000.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return path.name


def flip_a_bit_of_the_tokenizer(checkpoint: Path) -> str:
    """It is no other tokenizer, with which the data would have to be built again."""
    flip_a_byte(checkpoint / "tokenizer.model")
    return "tokenizer.model is damaged"


def lose_a_piece(checkpoint: Path) -> str:
    (checkpoint / "rank_00001.safetensors").unlink()
    return "rank_00001.safetensors is missing"


def edit_the_manifest(checkpoint: Path) -> str:
    path = checkpoint / MANIFEST
    path.write_text(path.read_text().replace('"step": 4', '"step": 3', 1))
    return f"{MANIFEST} is damaged"


DAMAGES = [
    flip_a_byte_of_a_piece,
    truncate,
    flip_a_bit_of_the_tokenizer,
    lose_a_piece,
    edit_the_manifest,
]
"""What somebody made up is in ``test_hostile.py``."""


def test_damage_is_one_clear_error_on_every_rank(shards, written, copied, tmp_path):
    good = copied / CHECKPOINTS / "step_000004"
    cases = []
    for damage in DAMAGES:
        folder = Path(shutil.copytree(good, tmp_path / damage.__name__))
        cases.append(({**SHORT, "run.resume": folder}, [str(folder), damage(folder)]))
    other = {"model.hidden_size": 64, "model.tie_embeddings": False}
    said = ["a different model", "model.hidden_size: checkpoint 32, run 64", "model.tie_embeddings"]
    cases.append(({**SHORT, **other, "run.resume": good}, said))
    cases.append(({**SHORT, "run.resume": tmp_path / "nowhere"}, ["neither a checkpoint", str(tmp_path / "nowhere")]))
    run(refuse_each, 2, shards, copied, cases)
    assert rows(copied) == rows(written(PLAIN)), "a refused start leaves the run as it was"
    assert [p.name for p in list_checkpoints(copied)] == ["step_000002", "step_000004"]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_newest_good_passes_a_damaged_one_over(copied, damage, caplog):
    said = damage(copied / CHECKPOINTS / "step_000004")
    assert find_resume(copied, "newest-good") == copied / CHECKPOINTS / "step_000002"
    assert f"Skipped {copied / CHECKPOINTS / 'step_000004'}: " in caplog.text
    assert said in caplog.text
    assert find_resume(copied, "latest") == copied / CHECKPOINTS / "step_000004", (
        "latest is the newest, checked on loading"
    )


def test_resume_from_newest_good_rewrites_the_history_after_it(shards, written, copied):
    flip_a_byte_of_a_piece(copied / CHECKPOINTS / "step_000004")
    run(train, 2, shards, copied, {**settings(*PLAIN), "run.resume": "newest-good"})
    assert rows(copied) == rows(written(PLAIN))
    assert CheckpointReader(copied / CHECKPOINTS / "step_000004").verify() == []
    assert (copied / CHECKPOINTS / "step_000004.discarded").is_dir()


# Killed.


@pytest.mark.parametrize("name", EVERY_KILL)
def test_a_killed_run_is_left_with_a_good_checkpoint(killed, name):
    folder = killed(name)
    newest = find_resume(folder, "latest")
    assert newest is not None
    assert CheckpointReader(newest).verify() == []
    assert find_resume(folder, "newest-good") == newest
    hidden = [path.name for path in (folder / CHECKPOINTS).glob(".*")]
    # A chore of the second save may be done when the third one is under way.
    before, after = ("step_000002", [".step_000004.partial"]), ("step_000004", [])
    allowed = [before, after, ("step_000004", [".step_000006.partial"])]
    if name in BEFORE_THE_RENAME:
        allowed = [before]
    elif name in AFTER_THE_RENAME:
        allowed.remove(before)
    assert (newest.name, hidden) in allowed


@pytest.mark.parametrize("name", EVERY_KILL)
def test_a_killed_run_that_goes_on_equals_one_that_was_never_killed(gone_on, killed, unbroken, name):
    folder = gone_on(name)
    assert rows(folder) == rows(unbroken)
    for mine, theirs in zip(list_checkpoints(folder), list_checkpoints(unbroken), strict=True):
        files = [CheckpointReader(path).manifest["files"] for path in (mine, theirs)]
        assert files[0] == files[1], f"{mine.name} holds other bytes"
    assert not list((folder / CHECKPOINTS).glob(".*")), "what the killed save left is cleaned up"
    # Rows that were done again are kept aside.
    aside = list(readable_records(folder / DISCARDED_FILE))
    newest = int(list_checkpoints(killed(name))[-1].name.removeprefix("step_"))
    assert aside == [row for row in read_metrics(killed(name)) if row["step"] > newest]
    assert aside or name not in STEPS_LOST


# No room.


@pytest.fixture
def small_disk(written, tmp_path) -> Iterator[Path]:
    """A file system with room for one checkpoint and not for two."""
    one = sum(path.stat().st_size for path in list_checkpoints(written(PLAIN))[0].iterdir())
    size = int(1.6 * one) + 100_000  # a little for metrics and logs
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a small tmpfs: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def check_older_one_is_good(folder: Path) -> None:
    assert [p.name for p in (folder / CHECKPOINTS).iterdir()] == ["step_000002"], "nothing half-written"
    assert CheckpointReader(folder / CHECKPOINTS / "step_000002").verify() == []


def test_a_full_disk(shards, small_disk):
    folder = small_disk / "run"
    said = ["CheckpointError", "No space left on device", "lower checkpoint.keep_last", "--run.resume latest"]
    run(end_guarded, 2, shards, folder, settings(*PLAIN), 1, said)
    check_older_one_is_good(folder)


def test_one_rank_that_cannot_write_ends_all_and_the_older_checkpoint_serves(shards, written, copied, tmp_path):
    """Its files may not grow: the kernel's EFBIG stands for whatever befalls one host of many."""
    shutil.rmtree(copied / CHECKPOINTS / "step_000004")
    changed = {**settings(*PLAIN), "run.resume": "latest"}
    run(end_guarded, 2, shards, copied, changed, 1, ["CheckpointError", "rank 1", "File too large"], 100_000)
    check_older_one_is_good(copied)
    run(train, 2, shards, copied, changed)
    assert rows(copied) == rows(written(PLAIN))


def test_only_the_newest_are_kept(shards, tmp_path):
    run(train, 1, shards, tmp_path, {"parallel.context": 1, "validation.rows": 0, "checkpoint.keep_last": 2})
    assert [p.name for p in list_checkpoints(tmp_path)] == [f"step_{n:06d}" for n in (STEPS - 2, STEPS)]


def test_nothing_is_drawn_that_a_checkpoint_fills(written, shards, base):
    checkpoint = list_checkpoints(written(PLAIN))[-1]
    run(build_undrawn, 2, shards, base / "undrawn", checkpoint, settings(*PLAIN))
