"""A run's data over several ranks: each file read once, damage named everywhere, other data under a path refused."""

from __future__ import annotations

import functools
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

import data_pipeline.shards.shard_verification
import launcher.training.data_check
from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.sources import open_source
from data_pipeline.shards.reader import ShardSet
from launcher.training.data_check import check_data
from launcher.training.run_state import TrainingRun
from longctx.errors import DataError
from longctx.files import hash_file
from longctx.tokenizer import load_tokenizer
from parallel.comm.world import gather_objects
from tests.data_pipeline.lengths import strip_sums
from tests.helpers import run_distributed
from tests.launcher.cli.calls import flip_a_byte
from tests.launcher.workers import breaking_step, build, end_guarded, rows


@pytest.fixture(scope="module")
def many(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny corpus in a dozen shards, with a validation folder of its own."""
    folder = tmp_path_factory.mktemp("many")
    for number in range(24):
        text = "".join(f"def f{number}_{line}(x): return x * {line}\n" for line in range(10 + 9 * number))
        (folder / f"{number:02}.py").write_text(text)
    output = folder / "shards"
    build_shards(open_source(folder), load_tokenizer(shards), output, validation_fraction=0.2, shard_tokens=6_000)
    return output


def opened(folder: Path) -> list[ShardSet]:
    return [ShardSet.open(path) for path in (folder, folder / "validation")]


def counted(folder: Path, verify: str) -> list[Path]:
    """The files that this rank really reads in ``check_data``, as it says itself."""
    read: list[Path] = []

    def hash_and_count(path: Path) -> str:
        read.append(path)
        return hash_file(path)

    data_pipeline.shards.shard_verification.hash_file = hash_and_count  # type: ignore[attr-defined]
    told = check_data(opened(folder), verify)  # type: ignore[arg-type]
    assert [(entry.file, entry.bytes) for entry in told] == [(path.name, path.stat().st_size) for path in read]
    return read


def every_file(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.arrow"))


def start_with_cache(cache: Path) -> None:
    os.environ["LONGCTX_CACHE"] = str(cache)
    # The files of a test are seconds old.
    data_pipeline.shards.shard_verification._MIN_AGE_NANOSECONDS = -(10**12)


def read_once_over_all(folder: Path, cache: Path) -> None:
    start_with_cache(cache)
    world = dist.get_world_size()
    of_all = gather_objects(counted(folder, "start"))
    assert sorted(path for paths in of_all for path in paths) == every_file(folder)
    sizes = [sum(path.stat().st_size for path in paths) for paths in of_all]
    of_files = [path.stat().st_size for path in every_file(folder)]
    assert max(sizes) <= sum(of_files) / world + max(of_files)
    dist.barrier()
    # Known now.
    assert counted(folder, "start") == counted(folder, "off") == []


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_file_is_read_once_over_all_ranks(many: Path, tmp_path: Path, ranks: int):
    assert len(every_file(many)) > 6
    run_distributed(read_once_over_all, ranks, many, tmp_path / "cache")


def read_of_own_copies(folder: Path, cache: Path) -> None:
    """Ranks 0 and 1 share a machine, ranks 2 and 3 another: each pair has a copy of its own."""
    start_with_cache(cache)
    rank = dist.get_rank()
    host = rank // 2
    data_pipeline.shards.shard_verification.place_of = lambda path: f"host {host}"  # type: ignore[attr-defined]
    of_all = gather_objects(counted(folder, "start"))
    for pair in (of_all[:2], of_all[2:]):
        assert sorted(path for paths in pair for path in paths) == every_file(folder)


def test_hosts_with_copies_of_their_own_read_each_theirs(many: Path, tmp_path: Path):
    run_distributed(read_of_own_copies, 4, many, tmp_path / "cache")


def name_damage(folder: Path, cache: Path) -> None:
    start_with_cache(cache)
    with pytest.raises(DataError) as caught:
        check_data(opened(folder), "start")
    said = str(caught.value).splitlines()
    assert [re.findall(r"\w+\.arrow", line) for line in said] == [["00001.arrow"], ["00000.arrow"]]
    assert "validation" in said[1]
    # What was damaged got no stamp, nor did the others of that check.
    assert not cache.exists()
    for verify in ("off", "read"):
        assert check_data(opened(folder), verify) == []  # type: ignore[arg-type]


def test_damaged_files_are_named_on_every_rank(many: Path, tmp_path: Path):
    folder = Path(shutil.copytree(many, tmp_path / "damaged"))
    for name in ("00001.arrow", "validation/00000.arrow"):
        flip_a_byte(folder / name)
    run_distributed(name_damage, 3, folder, tmp_path / "cache")


def refuse_other_data(folders: list[Path], cache: Path) -> None:
    start_with_cache(cache)
    sets = opened(folders[0])
    if dist.get_rank() == 2:
        sets = opened(folders[1])
    with pytest.raises(DataError, match=r"differs between ranks: .* on rank 0 and \w+ on rank 2\."):
        check_data(sets, "off")
    if dist.get_rank() == 1:
        del sets[1]
    with pytest.raises(DataError, match=r"rank 0 has 2 .*, rank 1 has 1"):
        check_data(sets, "off")


def test_other_data_under_a_path_is_refused_on_every_rank(many: Path, shards: Path, tmp_path: Path):
    run_distributed(refuse_other_data, 3, [many, shards], tmp_path / "cache")


def go_on_without_a_cache(folder: Path, cache: Path) -> None:
    start_with_cache(cache)
    warned: list[str] = []
    launcher.training.data_check.log.warning = lambda text, *values: warned.append(text % values)  # type: ignore[method-assign]
    for _ in range(2):
        counted(folder, "start")
    assert len(warned) == 2
    assert "could not be written" in warned[0]
    assert "LONGCTX_CACHE" in warned[0]


def test_a_cache_that_cannot_be_written_costs_a_warning(many: Path, tmp_path: Path):
    (tmp_path / "cache").write_text("a file stands there")
    run_distributed(go_on_without_a_cache, 2, many, tmp_path / "cache")


def refuse_in_a_run(folder: Path, output: Path, cache: Path) -> None:
    os.environ["LONGCTX_CACHE"] = str(cache)
    with pytest.raises(DataError, match=r"00001\.arrow is damaged"):
        build(folder, output, {"data.verify": "start"})
    assert not (output / "checkpoints").exists()
    build(folder, output, {"data.verify": "off"})
    assert "data.verify=off" in (output / f"logs/rank_{os.environ['RANK']}.log").read_text()


def test_a_run_reads_what_its_config_asks_for(many: Path, tmp_path: Path):
    folder = Path(shutil.copytree(many, tmp_path / "damaged"))
    flip_a_byte(folder / "00001.arrow")
    run_distributed(refuse_in_a_run, 2, folder, tmp_path / "run", tmp_path / "cache")


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (lambda path: os.truncate(path, 100), "changed while it was being read: it has 100 bytes and had"),
    "removed": (lambda path: path.unlink(), "is missing, though manifest.json lists it"),
    "replaced": (
        lambda path: Path(shutil.copy(path, path.with_suffix(".new"))).replace(path),
        "was replaced by another file while it was being read",
    ),
    "written to": (lambda path: path.write_bytes(bytes(path.stat().st_size)), "is damaged: bytes 0 to"),
}


def change_shards(change: str, run: TrainingRun) -> None:
    """What befalls the shards of a run in a step, while the next one's rows are ready on every rank."""
    while run.prefetcher._ready.empty():
        time.sleep(0.01)
    gather_objects(None)
    if run.is_rank_0:
        for path in run.loader.shards.folder.glob("*.arrow"):
            CHANGES[change][0](path)
    gather_objects(None)


def end_on_changed_data(folder: Path, output: Path, change: str, changed: dict) -> None:
    step = breaking_step(2, functools.partial(change_shards, change))
    end_guarded(folder, output, changed, 1, [CHANGES[change][1], ".arrow"], step=step)
    # Not the step that was ready, and no later one.
    assert [row["step"] for row in rows(output) if row["kind"] == "train"] == [1, 2, 3]


@pytest.mark.few(2)
@pytest.mark.parametrize("change", CHANGES)
def test_shards_that_change_under_a_run_end_every_rank(shards: Path, tmp_path: Path, change: str):
    folder = Path(shutil.copytree(shards, tmp_path / "data"))
    degree = {"cut short": 1, "removed": 2}.get(change, 1)
    run_distributed(end_on_changed_data, 2, folder, tmp_path / "run", change, {"parallel.context": degree})


def start_on_older_data(folder: Path, output: Path, cache: Path) -> None:
    start_with_cache(cache)
    run = build(folder, output, {})
    assert not run.loader.shards.verifies_reads
    log = (output / f"logs/rank_{os.environ['RANK']}.log").read_text()
    assert log.count("Built by a release without checksum blocks") == 1
    assert check_data(opened(folder), "read") == check_data(opened(folder), "read") == [], "stamped"
    with pytest.raises(DataError, match=r"00001\.arrow is damaged"):
        build(folder.with_name("damaged"), output.with_name("other"), {})


def test_data_of_older_releases_is_read_before_the_first_step(many: Path, tmp_path: Path):
    folder = Path(shutil.copytree(many, tmp_path / "older"))
    for path in (folder, folder / "validation"):
        strip_sums(path)
    flip_a_byte(Path(shutil.copytree(folder, tmp_path / "damaged")) / "00001.arrow")
    run_distributed(start_on_older_data, 2, folder, tmp_path / "run", tmp_path / "cache")
