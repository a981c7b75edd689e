"""A flipped bit in weights or moments: found at the next comparison, with rank and tensor, in every ZeRO stage."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from launcher.checkpoint.host_copy import HostCopy
from launcher.metrics.record import Record
from launcher.supervise.host_selection import suspected_ranks
from launcher.training.hooks.replica_watch import ReplicaWatch
from launcher.training.run_state import Progress, TrainingRun
from launcher.training.train_step import TrainStep
from launcher.training.trainer import Trainer
from longctx.checkpoint_format import list_checkpoints
from longctx.errors import CheckpointError, TrainingError
from parallel.comm.messages.message_checksum import Sum
from parallel.comm.world import gather_objects
from parallel.runtime.activity import ACTIVITY
from parallel.zero.optimizer import MASTER, MOMENTS
from parallel.zero.replica_check import MismatchedTensor, TensorPart, find_odd_ranks
from tests.faults import FaultRow, verdict
from tests.launcher.runs import SCREEN
from tests.launcher.workers import breaking_step, build, end_guarded, rows, run, train
from tests.parallel.comm.messages.faults import flip_bit

pytestmark = pytest.mark.timeout(240)

NAME = "model.layers.1.self_attn.q_proj.weight"
EXPERT = "model.layers.1.mlp.experts.down_proj"
CONTEXT = {"parallel.context": 2}


class Flip(NamedTuple):
    """A bit of one rank's memory."""

    stage: int
    role: str
    says: str
    name: str = NAME
    rank: int = 1
    ranks: int = 4
    changed: dict[str, Any] = CONTEXT


_OTHERS = "differs from the ranks that agree: "
_OWN = "has values that differ from its last update: "
FLIPS: dict[str, Flip] = {
    # Each rank answers for some tensors, and knows of those how it left them: of this one rank 1 does.
    "weight, stage 0": Flip(0, MASTER, f"{_OTHERS}{NAME} (master)", rank=3),
    "weight that the rank answers for, stage 0": Flip(0, MASTER, f"{_OWN}{NAME} (master)"),
    "moment, stage 0": Flip(0, MOMENTS[0], f"{_OTHERS}{NAME} (exp_avg)", rank=2),
    "weight of forward, stage 1": Flip(1, "", f"{_OTHERS}{NAME} (weight of forward)"),
    "weight of forward, stage 2": Flip(2, "", f"{_OTHERS}{NAME} (weight of forward)", rank=3),
    "master, stage 1": Flip(1, MASTER, f"{_OWN}"),
    "moment, stage 1": Flip(1, MOMENTS[1], f"{_OWN}", rank=0),
    "moment, stage 2": Flip(2, MOMENTS[0], f"{_OWN}", rank=2),
    "master, stage 3": Flip(3, MASTER, f"{_OWN}{NAME} (master)", rank=3),
    "moment, stage 3": Flip(3, MOMENTS[0], f"{_OWN}{NAME} (exp_avg)"),
    "expert, stage 0": Flip(0, MASTER, "Ranks 1 on ", EXPERT, rank=3, changed={**CONTEXT, "parallel.expert": 2}),
    "weight on one of two ranks, stage 1": Flip(1, "", "Ranks 0 on ", ranks=2),
    "moment of the only rank": Flip(
        1, MOMENTS[0], f"{_OWN}{NAME} (exp_avg)", rank=0, ranks=1, changed={"parallel.context": 1}
    ),
}


def flip_in(run: TrainingRun, flip: Flip) -> None:
    """Flip a bit of what the rank holds of the tensor; where it holds none of it, of the first that it does."""
    if run.mesh.rank != flip.rank:
        return
    partition, parameters = run.engine.partition, dict(run.engine.model.network.named_parameters())
    if not flip.role:
        flip_bit(partition.working_part(flip.name, parameters[flip.name]), 33)
        return
    named = [flip.name, *parameters]
    name = next(name for name in named if partition.extent(name, parameters[name]).numel)
    held = partition.part(name, parameters[name])[flip.role]
    flip_bit(held.detach()[: partition.extent(name, parameters[name]).numel], 33)


def find(name: str, shards: Path, output: Path) -> None:
    """Steps of which the third finds it, before its update."""
    flip = FLIPS[name]
    changed = {**flip.changed, "zero.stage": flip.stage, "run.replicas_every": 3, "validation.rows": 0}
    trainer = Trainer(build(shards, output, changed))
    trainer.take_step()
    trainer.take_step()
    flip_in(trainer.run, flip)
    with pytest.raises(TrainingError) as caught:
        trainer.take_step()
    said, record = str(caught.value), caught.value.record
    assert len(set(gather_objects(said))) == 1, "the same on every rank"
    assert said.startswith("in step 3, bits in weights or moments have changed without an update"), said
    assert flip.says in said, said
    # Where it is decided, one rank is named, and it is the right one.
    if flip.says.startswith(("differs from", _OWN[:10])):
        assert f"Rank {flip.rank} on " in said, said
        assert said.count("Rank ") == 1, said
        # By which ``longctx run`` knows whose host to leave out.
        assert suspected_ranks(record or {}) == [flip.rank]
    assert len(said.splitlines()) < SCREEN
    assert trainer.progress.step == 2


FAST = "weight on one of two ranks, stage 1"


@pytest.mark.parametrize("name", [FAST, *(pytest.param(n, marks=pytest.mark.slow) for n in FLIPS if n != FAST)])
def test_a_flipped_bit_is_found_at_the_next_comparison(name, shards, tmp_path):
    run(find, FLIPS[name].ranks, name, shards, tmp_path / "run")


def save_nothing_odd(shards: Path, output: Path) -> None:
    """Stage 0: the weights are compared before they are saved, in whichever step."""
    trainer = Trainer(build(shards, output, {**CONTEXT, "zero.stage": 0, "run.replicas_every": 100}))
    trainer.take_step()
    flip_in(trainer.run, FLIPS["weight, stage 0"])
    with pytest.raises(TrainingError, match="the weights after step 1, which are not saved"):
        trainer._save()
    assert not list_checkpoints(output)


@pytest.mark.slow
def test_weights_that_differ_are_not_saved(shards, tmp_path):
    run(save_nothing_odd, 4, shards, tmp_path / "run")


def flipping_step(flip: Flip, step: int, at: Path | None = None) -> type[TrainStep]:
    """Steps of which one leaves a flipped bit behind, before its checkpoint is written."""

    class FlippingStep(TrainStep):
        def __call__(self, progress: Progress) -> tuple[Progress, Record]:
            taken = super().__call__(progress)
            if taken[0].step == step:
                flip_in(self.run, flip)
                if at is not None and self.run.mesh.rank == flip.rank:
                    at.write_text(str(time.time()))
            return taken

    return FlippingStep


def save_nothing_flipped(name: str, shards: Path, output: Path) -> None:
    """What a rank alone holds, with the defaults: step 4 is saved, and no comparison of every 20 steps is near."""
    flip = FLIPS[name]
    changed = {**flip.changed, "zero.stage": flip.stage, "run.replicas_every": 20, "checkpoint.every_steps": 2}
    run_ = build(shards, output, {**changed, "train.steps": 6, "validation.every_steps": 2})
    with pytest.raises(TrainingError, match="the weights after step 4, which are not saved") as caught:
        Trainer(run_, train_step=flipping_step(flip, 4)(run_)).train()
    assert f"Rank {flip.rank} on " in str(caught.value)
    assert flip.says in str(caught.value)
    assert suspected_ranks(caught.value.record or {}) == [flip.rank]
    assert [path.name for path in list_checkpoints(output)] == ["step_000002"]


FAST_SAVE = "moment of the only rank"
SAVED = [name for name, flip in FLIPS.items() if flip.says.startswith(_OWN[:10]) and flip.stage]


@pytest.mark.parametrize(
    "name", [FAST_SAVE, *(pytest.param(n, marks=pytest.mark.slow) for n in SAVED if n != FAST_SAVE)]
)
def test_what_flips_between_an_update_and_its_save_is_not_saved(name, shards, tmp_path):
    run(save_nothing_flipped, FLIPS[name].ranks, name, shards, tmp_path / "run")


def _save_whole(run_: TrainingRun, sums: list[Sum]) -> None:
    run_.saver.save(step=2, training={}, sums=sums)
    run_.saver.finish()


def commit_no_flipped_copy(shards: Path, output: Path, waits: bool) -> None:
    """A bit flips on the way to the file of rank 1: in the copy that a thread writes, or in what ZeRO holds."""
    run_ = build(shards, output, {**CONTEXT, "zero.stage": 2, "checkpoint.wait": waits, "train.steps": 9})
    trainer = Trainer(run_)
    trainer.take_step()
    run_.saver.after_step(1, 1.0)
    trainer._save()
    run_.saver.finish()
    trainer.take_step()
    fill, engine = HostCopy.fill, run_.engine
    owned = type(engine).owned_ranges

    def flipped_copy(self: HostCopy, *given: Any) -> list[Any]:
        held = fill(self, *given)
        flip_bit(held[-1], 33)
        return held

    def flipped_state(self: Any) -> Any:
        for one in owned(self):
            flip_bit(one.values, 33)
            yield one

    sums = trainer._train_step.hook(ReplicaWatch).before_save(2)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(HostCopy, "fill", flipped_copy)
            patch.setattr(type(engine), "owned_ranges", flipped_state if waits else owned)
        with pytest.raises(CheckpointError) as caught:
            _save_whole(run_, sums)
    for said in gather_objects(str(caught.value)):
        assert "of rank 1 has a checksum mismatch: its bits changed in memory between the last update and the" in said
    assert [path.name for path in list_checkpoints(output)] == ["step_000001"]
    assert not list(output.glob("checkpoints/.*"))


@pytest.mark.parametrize("waits", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_flips_on_the_way_to_the_disk_is_not_committed(waits, shards, tmp_path):
    run(commit_no_flipped_copy, 2, shards, tmp_path / "run", waits)


def come_late(shards: Path, output: Path) -> None:
    run_, patient = build(shards, output, CONTEXT), []
    if dist.get_rank() == 0:
        threading.Timer(0.4, lambda: patient.append(ACTIVITY.patient)).start()
    else:
        time.sleep(0.8)
    ReplicaWatch(run_).before_save(1)
    assert all(patient)
    assert len(patient) == (dist.get_rank() == 0)


def test_a_rank_that_is_late_to_a_save_is_waited_for_patiently(shards, tmp_path):
    run(come_late, 2, shards, tmp_path / "run")


class Struck(NamedTuple):
    """When a bit flips in a run that goes on afterwards, and what its user reads."""

    when: str
    changed: dict[str, Any]
    words: tuple[str, ...]
    steps_lost: int
    """Steps that were taken, and are behind the checkpoint."""
    at_a_save: bool = False


IN_A_STEP = Struck(
    "behind step 5; run.replicas_every = 3",
    {"run.replicas_every": 3},
    ("TrainingError: in step 6", "bits in weights or moments have changed"),
    steps_lost=1,
)
AT_A_SAVE = Struck(
    "between step 6 and its save; defaults",
    {},
    ("TrainingError: in the weights after step 6, which are not saved",),
    steps_lost=2,
    at_a_save=True,
)


def end_by(name: str, shards: Path, output: Path, struck: Struck) -> None:
    flip, at = FLIPS[name], output.parent / "at"

    def act(run: TrainingRun) -> None:
        flip_in(run, flip)
        if run.mesh.rank == flip.rank:
            at.write_text(str(time.time()))

    step = flipping_step(flip, 6, at) if struck.at_a_save else breaking_step(6, act)
    words = [flip.says, *struck.words, "step_000004 (--run.resume "]
    changed = {**flip.changed, "zero.stage": flip.stage, **struck.changed}
    end_guarded(shards, output, changed, 1, words, step=step, seen=output.parent / "screen")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "struck"),
    [
        *((name, IN_A_STEP) for name in ("weight, stage 0", "moment, stage 0", "master, stage 1", "moment, stage 3")),
        *((name, AT_A_SAVE) for name in ("master, stage 1", "moment, stage 3")),
    ],
)
def test_a_run_that_goes_on_is_as_if_nothing_had_been(name, struck, shards, tmp_path, fault_rows):
    flip, quiet, broken = FLIPS[name], tmp_path / "quiet", tmp_path / "broken"
    changed = {**flip.changed, "zero.stage": flip.stage, **struck.changed}
    run(train, flip.ranks, shards, quiet, changed)
    run(end_by, flip.ranks, name, shards, broken, struck)
    seconds = time.time() - float((tmp_path / "at").read_text())
    run(train, flip.ranks, shards, broken, {**changed, "run.resume": broken / "checkpoints" / "step_000004"})
    kind = f"a flipped bit in a {name}"
    if struck.at_a_save:
        kind += ", at a save"
    fault_rows.add(
        FaultRow(
            group="numbers",
            kind=kind,
            injected=f"of rank {flip.rank} of {flip.ranks}, {struck.when}",
            seen=verdict((tmp_path / "screen").read_text(), flip.says),
            seconds=seconds,
            steps_lost=struck.steps_lost,
            beyond_checkpoint=0,
            equal=rows(broken) == rows(quiet),
        )
    )


def test_three_decide_and_two_do_not():
    part = TensorPart("w", MASTER)
    assert list(find_odd_ranks(part, {0: 7, 1: 7, 2: 8})) == [MismatchedTensor(part=part, ranks=(2,), decided=True)]
    assert list(find_odd_ranks(part, {0: 7, 1: 8})) == [MismatchedTensor(part=part, ranks=(0, 1), decided=False)]
    assert list(find_odd_ranks(part, {0: 7, 1: 7, 2: 8, 3: 8})) == [
        MismatchedTensor(part=part, ranks=(0, 1, 2, 3), decided=False)
    ]
    assert list(find_odd_ranks(part, {0: 7, 1: 7, 2: 8, 3: 9})) == [
        MismatchedTensor(part=part, ranks=(0, 1, 2, 3), decided=False)
    ]
    assert list(find_odd_ranks(part, {0: 7, 1: 7})) == []


def clean(shards: Path, output: Path) -> None:
    """Every stage and place of the state, with a comparison in every step, and buffers that move."""
    ways: list[dict[str, Any]] = [{"zero.stage": stage} for stage in range(4)]
    ways += [{"zero.stage": stage, "zero.offload": "cpu"} for stage in (2, 3)]
    ways.append({"zero.stage": 3, "zero.offload": "nvme", "zero.nvme_path": output})
    ways += [{"zero.stage": stage, "train.dtype": "bfloat16"} for stage in (1, 3)]
    for number, way in enumerate(ways):
        bias = {"model.selection_bias": True, "model.selection_bias_rate": 0.01}
        degrees = {"parallel.context": 2, "parallel.expert": dist.get_world_size()}
        changed = {**bias, **degrees, **way, "run.replicas_every": 1, "validation.rows": 0}
        trainer = Trainer(build(shards, output / str(number), changed))
        for _ in range(4):
            trainer.take_step()


@pytest.mark.slow
def test_nothing_is_found_in_a_clean_run_of_any_stage(shards, tmp_path):
    run(clean, 2, shards, tmp_path)
    run(clean, 4, shards, tmp_path)
