"""A wrong number in one rank's computation ends the run, with that rank's name; a right one never does."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.metrics.record import Record
from launcher.training.setup import Progress
from launcher.training.step import TrainStep
from parallel.audit.capture import OPERATORS
from tests.launcher.workers import rows, run, train_each

pytestmark = pytest.mark.timeout(240)

FLOAT32 = {"parallel.context": 2}


def flip(x: Tensor, place: int, bit: int) -> None:
    """Flip one bit of a tensor, wherever its values lie."""
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    index = []
    for size in reversed(x.shape):
        place, n = divmod(place, size)
        index.append(n)
    value = x[tuple(reversed(index))]
    word = value.view(width)
    mask = torch.tensor(1 << bit) if bit < 8 * x.element_size() - 1 else torch.tensor(-(1 << bit))
    word ^= mask.to(width)


class Flip(TorchDispatchMode):
    """A processor that goes wrong: flips a bit of a result. It lies below the audit, which is entered later."""

    def __init__(self, call: int, bit: int, *, repeats: bool = False) -> None:
        super().__init__()
        self.call, self.bit, self.repeats, self.seen = call, bit, repeats, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in OPERATORS["product"]:
            self.seen += 1
            if self.seen == self.call or self.repeats:
                flip(result, Random(self.seen).randrange(result.numel()), self.bit)
        return result


def equal_runs(shards: Path, output: Path, changed: dict[str, Any]) -> None:
    runs = {output / str(every): {**changed, "run.audit_every": every} for every in (0, 1)}
    train_each(shards, runs)


CASES = {
    "context": {"zero.stage": 1},
    "experts": {"zero.stage": 3, "parallel.expert": 2},
    "bfloat16": {"zero.stage": 2, "train.dtype": "bfloat16", "train.tokens_per_step": 1024},
    "chunks": {"zero.stage": 1, "train.chunk_tokens": 32},
    "whole": {"zero.stage": 0, "parallel.context": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_an_audited_run_is_what_it_would_be_without(shards, tmp_path, case):
    run(equal_runs, 2, shards, tmp_path, CASES[case])
    with_audits, without = rows(tmp_path / "1"), rows(tmp_path / "0")
    kinds = {row.pop("audited") for row in with_audits if row["kind"] == "train"}
    assert len(kinds) > 1
    assert with_audits == without


class FlippedStep(TrainStep):
    """One rank's products go wrong in one step."""

    rank, step, bit, repeats = 1, 4, 27, False

    def __call__(self, progress: Progress) -> tuple[Progress, Record]:
        if self.run.mesh.rank != self.rank or progress.step + 1 != self.step:
            return super().__call__(progress)
        with FlipSampled(self.audit, self.bit, repeats=self.repeats):
            return super().__call__(progress)
