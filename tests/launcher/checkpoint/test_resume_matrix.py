"""Four ranks, 48 ways to spread a run over them: what each one wrote goes on in a reference's, and the reverse.

A way is a ZeRO stage, the ranks that share a row, those that share the experts, and whole layers or chunks of them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from longctx.checkpoint_format import CHECKPOINTS
from tests.helpers import run_distributed
from tests.launcher.workers import rows, train_each

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

WORLD, STEPS, SAVED = 4, 4, 2
PAIRS = 20
"""Ways drawn to go on from another one."""
AT_ONCE = 12
"""Runs that one start of four processes takes in turn: each leaves process groups behind."""
SAME: dict[str, Any] = {
    "data.seq_len": 128,
    "train.tokens_per_step": 128 * WORLD,
    "train.steps": STEPS,
    "train.lr": 1e-3,
    "train.dtype": "float32",
    "checkpoint.every_steps": SAVED,
    "validation.rows": 0,
    "validation.every_steps": 0,
}


class Way(NamedTuple):
    """How a run is spread over the ranks."""

    zero: int
    context: int
    expert: int
    chunk_tokens: int

    @property
    def settings(self) -> dict[str, Any]:
        """Its keys, beside those that all runs have."""
        own = {"zero.stage": self.zero, "parallel.context": self.context, "parallel.expert": self.expert}
        return {**SAME, **own, "train.chunk_tokens": self.chunk_tokens}

    @property
    def name(self) -> str:
        """That of its folder."""
        return f"zero{self.zero}_context{self.context}_expert{self.expert}_chunks{self.chunk_tokens}"


REFERENCE = Way(1, 1, 1, 0)
# 13 divides no rank's share of a row.
WAYS = [Way(*way) for way in itertools.product((0, 1, 2, 3), (1, 2, 4), (1, 2), (0, 13))]


def train_all(shards: Path, runs: Mapping[Path, Mapping[str, Any]]) -> None:
    """Train runs on four ranks, some at a time."""
    folders = list(runs)
    for first in range(0, len(folders), AT_ONCE):
        some = {folder: runs[folder] for folder in folders[first : first + AT_ONCE]}
        run_distributed(train_each, WORLD, shards, some, timeout=400)


def go_on(shards: Path, folder: Path, pairs: Iterable[tuple[Path, Way]]) -> list[Path]:
    """Go on from checkpoints in other ways; the folders of the new runs."""
    runs: dict[Path, dict[str, Any]] = {}
    for number, (source, way) in enumerate(pairs):
        checkpoint = source / CHECKPOINTS / f"step_{SAVED:06}"
        runs[folder / f"{number:03}_{source.name}_as_{way.name}"] = {**way.settings, "run.resume": checkpoint}
    train_all(shards, runs)
    return list(runs)


def check_steps(got: Path, wanted: Path, first: int) -> None:
    """From this step on, losses and norms are those of a run that never stopped."""
    mine, others = rows(got), [row for row in rows(wanted) if row["step"] >= first]
    assert [row["step"] for row in mine] == list(range(first, STEPS + 1)), got.name
    for row, other in zip(mine, others, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5), got.name
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5), got.name
        assert row["tokens"] == other["tokens"], got.name


@pytest.fixture(scope="module")
def written(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Way, Path]:
    """A run of each way, with a checkpoint in its middle."""
    base = tmp_path_factory.mktemp("written")
    folders = {way: base / way.name for way in WAYS}
    train_all(shards, {folder: way.settings for way, folder in folders.items()})
    return folders


def test_every_way_trains_the_same(written: dict[Way, Path]) -> None:
    for folder in written.values():
        check_steps(folder, written[REFERENCE], 1)


def test_the_reference_goes_on_from_every_way(shards: Path, written: dict[Way, Path], tmp_path: Path) -> None:
    for got in go_on(shards, tmp_path, [(folder, REFERENCE) for folder in written.values()]):
        check_steps(got, written[REFERENCE], SAVED + 1)


def test_every_way_goes_on_from_the_reference(shards: Path, written: dict[Way, Path], tmp_path: Path) -> None:
    for got in go_on(shards, tmp_path, [(written[REFERENCE], way) for way in WAYS]):
        check_steps(got, written[REFERENCE], SAVED + 1)


def test_ways_go_on_from_one_another(shards: Path, written: dict[Way, Path], tmp_path: Path) -> None:
    drawn = random.Random(18)
    pairs = [(written[source], target) for source, target in (drawn.sample(WAYS, 2) for _ in range(PAIRS))]
    for got in go_on(shards, tmp_path, pairs):
        check_steps(got, written[REFERENCE], SAVED + 1)
