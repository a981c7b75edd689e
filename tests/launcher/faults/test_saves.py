"""A rank is killed at every stage of a save: the checkpoint before stays good, or the new one is whole."""

from __future__ import annotations

import pytest

from longctx.checkpoint_format import CHECKPOINTS, MANIFEST
from tests.launcher.faults.scene import Scene, newest_good
from tests.launcher.test_accidents import Accident, Place, check

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SAVER, SAVE = "launcher.checkpoint.background_saver", "launcher.checkpoint.checkpoint_files"
STAGES = {
    "before anything is copied": (1, SAVER, "HostCopy.fill", ""),
    "before a rank writes its file": (1, SAVE, "write_pieces", ""),
    "before a rank reads its file back": (1, SAVE, "read_back", "rank_00001.safetensors"),
    "before the commit": (0, SAVER, "commit", ""),
    "before the tokenizer is written": (0, SAVE, "_write_extra_file", ""),
    "before the manifest is synced": (0, SAVE, "sync_path", MANIFEST),
    "before the rename": (0, SAVE, "sync_path", ".step_000004.partial"),
    "after the rename": (0, SAVE, "sync_path", CHECKPOINTS),
    "before the proof": (0, SAVER, "write_proof", ""),
    "before older ones go": (0, SAVER, "prune", ""),
}
"""The rank that is killed, and the function that it does not come to do for the second checkpoint."""


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_is_killed(scene: Scene, stage: str):
    rank, module, function, file = STAGES[stage]
    # The folder that is renamed has a name of its own; of all others the second call is the second checkpoint's.
    call = 1 if file.startswith(".") else 2
    place = Place("save", module, function, call=call)
    accident = Accident(rank=rank, place=place, kind="SIGKILL", ranks=2, file=file, after=0.0)
    outcome = scene.strike(accident)
    check(accident, outcome)
    assert newest_good(scene.run) in (2, 4), "nothing half-written is taken for a checkpoint"
    scene.record(
        "save",
        f"SIGKILL {stage}",
        injected=f"rank {rank} of 2 is killed in the save of step 4, {stage}",
        seen=scene.seen(outcome.text, "died without a message"),
        seconds=outcome.seconds,
    )
    assert not list((scene.run / CHECKPOINTS).glob(".*")), "what the killed save left is cleaned up"
