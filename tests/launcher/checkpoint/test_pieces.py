"""A rank's ranges on the disk: what safetensors reads back, written a block at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from launcher.checkpoint import checkpoint_files as pieces
from launcher.checkpoint.background_saver import Saver
from launcher.checkpoint.checkpoint_files import piece_key, write_pieces
from longctx.files import hash_file
from parallel.comm.world import gather_on_rank_0
from parallel.zero.zero_state import OwnedRange, StatePiece
from tests.helpers import run_distributed
from tests.parallel.experts.expert_cases import CONFIG, RanksRun, Spread


def ranges() -> list[OwnedRange]:
    flat = torch.randn(100, generator=torch.Generator().manual_seed(1))
    return [
        OwnedRange("a.weight", "master", 0, flat[:37]),
        OwnedRange("a.weight", "exp_avg", 37, flat[37:38]),
        OwnedRange("é\n.bias", "master", 5, flat[38:].to(torch.bfloat16)),
        OwnedRange("empty", "master", 0, flat[:0]),
    ]


def piece_of(one: OwnedRange) -> StatePiece:
    return StatePiece(one.name, one.role, one.start, one.values.numel())


def test_safetensors_reads_what_was_written(tmp_path, monkeypatch):
    moved = []
    move = torch.Tensor.to

    def recorded(self: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        moved.append(self.numel())
        return move(self, *args, **kwargs)

    monkeypatch.setattr(pieces, "BLOCK_VALUES", 10)
    monkeypatch.setattr(torch.Tensor, "to", recorded)
    written = ranges()
    moved.clear()
    path = tmp_path / "rank_00000.safetensors"
    size, digest, _ = write_pieces(path, [piece_of(one) for one in written], (one.values for one in written))
    assert (size, digest) == (path.stat().st_size, hash_file(path))
    assert max(moved) == 10, "no range is ever whole beside what ZeRO holds"
    monkeypatch.undo()
    found = load_file(path)
    assert set(found) == {piece_key(piece_of(one)) for one in written}
    for one in written:
        assert found[piece_key(piece_of(one))].dtype == torch.float32
        assert torch.equal(found[piece_key(piece_of(one))], one.values.float())


def test_a_rank_without_ranges_writes_a_file(tmp_path):
    path = tmp_path / "rank_00001.safetensors"
    assert write_pieces(path, [], []) == (path.stat().st_size, hash_file(path), hash_file(path))
    assert load_file(path) == {}


def check_gathered() -> None:
    found = gather_on_rank_0(("piece", dist.get_rank()))
    wanted = []
    if dist.get_rank() == 0:
        wanted = [("piece", rank) for rank in range(dist.get_world_size())]
    assert found == wanted


@pytest.mark.parametrize("world", [1, 3])
def test_what_ranks_wrote_is_told_to_rank_0_alone(world):
    run_distributed(check_gathered, world)


def check_told_by_all(folder: Path) -> None:
    run, told = RanksRun(CONFIG, Spread(stage=2)), []
    gather_on_every_rank = dist.all_gather_object

    def noting(values: list, value: object, **options) -> None:
        told.append(value)
        gather_on_every_rank(values, value, **options)

    dist.all_gather_object = noting
    Saver(folder, run.engine, model=CONFIG, tokenizer_files={}).save(step=1, training={}, wait=True)
    assert told == [(None, False), None, None], "that nothing went wrong, and no list of pieces"


def test_a_save_tells_other_ranks_no_more_than_that_it_went_well(tmp_path):
    run_distributed(check_told_by_all, 2, tmp_path)
