"""Saving and loading checkpoints: training's wait, the next steps' cost, and a file of 1 GiB compared with peers.

    python -m benchmarks.saving [--quick]

First a training run with 83 million parameters on two ranks: the time a background save blocks training compared with a
synchronous one; CPU seconds of the main thread in the slower of the two steps after it, compared with steps without a
save; then the memory for saves: the peak over as many steps with saves and without, in ranks that return freed memory
at once. Then one process writes and reads 1 GiB of float32: every contender syncs files and folder, and fills existing
tensors from files outside the page cache; ours hashes what it writes, and verifies every checksum block before a value
in it is used. Results are the minimum over rounds that take turns. ``--save`` writes
``benchmarks/results/KIND/saving.json``; exit code 1 if a result is outside its bound.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from benchmarks.bounds import Bound, conclude, parse
from benchmarks.ranks import return_freed_memory, run_ranks
from benchmarks.start import make_shards
from benchmarks.start_memory import PeakMemory, load_config
from launcher.checkpoint.checkpoint_files import Contents, WrittenFile, commit, piece_key, write_pieces
from launcher.checkpoint.names import folder_of, hidden_folder, make_empty
from longctx.checkpoint_format import ROLES, CheckpointReader
from longctx.config import ModelConfig
from longctx.files import sync_path
from longctx.storage.hashed_file import read_back
from parallel.zero.zero_state import StatePiece

RANKS = 2
GIB = 1 << 30
VALUES = 4 << 20
"""Values per tensor: 16 MiB."""
PRELOAD = ("launcher.training.setup", "launcher.checkpoint.background_saver", "deepspeed.module_inject")
MODEL = {
    "model.vocab_size": 32_000,
    "model.hidden_size": 1024,
    "model.num_layers": 4,
    "model.num_heads": 16,
    "model.num_kv_heads": 16,
    "model.head_dim": 64,
    "model.ffn_size": 2752,
    "train.dtype": "float32",
    "train.steps": 1000,
    "checkpoint.every_steps": 10,
    "checkpoint.keep_last": 1,
}
SLOWER, BLOCKS, CPU, COPIES = 1.15, 0.25, 1.05, 1.1
"""Upper limits: over the fastest peer, over a synchronous save, over a step's CPU seconds, copies of a rank's own
bytes.
"""


# ------------------------------------------------------------------------------------------------ a run that saves


class SavingRun:
    """A training run with 83 million parameters that takes steps and saves on request."""

    def __init__(self, data: Path, output: Path, settings: dict[str, Any]) -> None:
        """Build it, and take the first step."""
        from launcher.training.setup import build_run
        from launcher.training.train_step import TrainStep

        logging.disable(logging.CRITICAL)
        with contextlib.redirect_stdout(io.StringIO()):
            config = load_config(data, output, settings)
            self._run = build_run(config, torch.device("cpu"))
        self._take = TrainStep(self._run)
        self._progress, _ = self._take(self._run.progress)

    def step(self, *, saver: bool = True) -> float:
        """Take a step, with or without the saver; return this thread's CPU seconds."""
        began = time.thread_time()
        self._progress, record = self._take(self._progress)
        if saver:
            self._run.saver.after_step(record["step"], record["loss"])
        return time.thread_time() - began

    def save(self, *, wait: bool) -> float:
        """Begin a save; return the seconds until training may continue."""
        began, step = time.perf_counter(), self._progress.step
        self._run.saver.save(step=step, training={"step": step}, loss=9.0, wait=wait)
        return time.perf_counter() - began

    def finish(self) -> None:
        """Wait until the save is durable."""
        self._run.saver.finish()

    def owned_bytes(self) -> int:
        """Return the bytes that this rank writes per checkpoint."""
        from launcher.checkpoint.host_copy import host_copy_bytes

        return host_copy_bytes(self._run.engine.owned_pieces())

    def close(self) -> None:
        """End the thread that reads rows."""
        self._run.prefetcher.close()


def seconds_of_saves(data: Path, output: Path, settings: dict[str, Any], rounds: int) -> dict[str, float]:
    """Take turns between steps alone, a synchronous save, and a background save with the two steps after it."""
    run = SavingRun(data, output, settings)
    found: dict[str, list[float]] = {"waited": [], "blocked": [], "alone": [], "first": [], "second": []}
    run.step()
    for _ in range(rounds):
        run.step()
        # One per round, as for each step after a save: the minimum over more would be lower by chance.
        found["alone"].append(run.step())
        found["waited"].append(run.save(wait=True))
        found["blocked"].append(run.save(wait=False))
        found["first"].append(run.step())
        found["second"].append(run.step())
        run.finish()
    run.close()
    least = {name: min(of) for name, of in found.items()}
    # The slower of both: during the first the thread writes, and the second allocates again the memory that the thread
    # freed.
    least["beside"] = max(least["first"], least["second"])
    return least


def memory_of_saves(data: Path, output: Path, settings: dict[str, Any], rounds: int) -> dict[str, float]:
    """Return peak memory in steps without a saver and in as many with background and synchronous saves, by turns."""
    # Without this, retained freed memory differs from step to step by a seventh of a rank's own bytes.
    return_freed_memory()
    run = SavingRun(data, output, settings)
    with PeakMemory() as training:
        for _ in range(2 * rounds):
            run.step(saver=False)
    # From the first step with the saver on, it has its memory.
    run.step()
    with PeakMemory() as saving:
        for _ in range(rounds):
            run.save(wait=True)
            run.save(wait=False)
            for _ in range(2):
                run.step()
            run.finish()
    run.close()
    return {"owned": run.owned_bytes(), "rise": saving.peak - training.peak}


def measure_run(rounds: int) -> dict[str, Any]:
    """Return the slowest rank's results."""
    with tempfile.TemporaryDirectory(prefix="longctx-saving-") as name:
        data = make_shards(Path(name))
        found, memory = (
            run_ranks(function, RANKS, data, Path(name) / function.__name__, MODEL, rounds, preload=PRELOAD)
            for function in (seconds_of_saves, memory_of_saves)
        )
    worst = {name: max(rank[name] for rank in ranks) for ranks in (found, memory) for name in ranks[0]}
    return {
        **{f"{name}_seconds": round(worst[name], 3) for name in ("waited", "blocked", "alone", "beside")},
        "owned_gib": round(worst["owned"] / GIB, 3),
        "rise_gib": round(worst["rise"] / GIB, 3),
        "blocked_share": round(worst["blocked"] / worst["waited"], 3),
        "cpu_ratio": round(max(rank["beside"] / rank["alone"] for rank in found), 3),
        "copies": round(worst["rise"] / worst["owned"], 3),
    }


# ---------------------------------------------------------------------------------------------------- 1 GiB, alone


class Contender(NamedTuple):
    """A way to write tensors into a folder, and to fill tensors from it."""

    save: Callable[[Path, dict[str, Tensor]], None]
    load: Callable[[Path, dict[str, Tensor]], None]


def _pieces(tensors: dict[str, Tensor]) -> list[StatePiece]:
    names = {key: key.rsplit("/", 1) for key in tensors}
    return [StatePiece(name, role, 0, tensors[key].numel()) for key, (name, role) in names.items()]


def save_ours(folder: Path, tensors: dict[str, Tensor], *, reads_back: bool = False) -> None:
    """Write a committed checkpoint of one rank, hashed while it is written."""
    target, pieces = folder_of(folder, 1), _pieces(tensors)
    make_empty(hidden_folder(target))
    path = hidden_folder(target) / "rank_00000.safetensors"
    written = write_pieces(path, pieces, tensors.values())
    assert not reads_back or read_back(path) == written.hash
    where = [
        (one.name, one.role, {"file": path.name, "key": piece_key(one), "start": 0, "numel": one.numel})
        for one in pieces
    ]
    shapes = {one.name: torch.Size([one.numel]) for one in pieces}
    contents = Contents(
        step=1,
        model=ModelConfig(),
        shapes=shapes,
        roles=dict.fromkeys(shapes, ROLES),
        dtype=torch.float32,
        training={},
        tokenizer_files={},
    )
    commit(target, [WrittenFile(path.name, written.num_bytes, written.hash, where, written.block_hashes)], contents)


def load_ours(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Verify every checksum block, and fill the tensors."""
    reader = CheckpointReader(folder_of(folder, 1), past_cache=True)
    assert not reader.size_problems()
    for key, tensor in tensors.items():
        name, role = key.rsplit("/", 1)
        reader.read_into(name, role, 0, tensor)
    reader.close()


def save_torch(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Save with ``torch.save``."""
    torch.save(tensors, folder / "state.pt")
    sync_path(folder / "state.pt")


def load_torch(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Load with ``torch.load``, mapped into memory: the faster way."""
    for key, loaded in torch.load(folder / "state.pt", mmap=True, weights_only=True).items():
        tensors[key].copy_(loaded)


def save_safetensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Save with ``safetensors.torch.save_file``."""
    save_file(tensors, folder / "state.safetensors")
    sync_path(folder / "state.safetensors")


def load_safetensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Load one tensor after the other."""
    with safe_open(folder / "state.safetensors", framework="pt") as file:
        for key, tensor in tensors.items():
            tensor.copy_(file.get_tensor(key))


def save_distributed(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Save with ``torch.distributed.checkpoint``, which syncs its files itself."""
    dcp.save(dict(tensors), storage_writer=FileSystemWriter(folder, sync_files=True), no_dist=True)


def load_distributed(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Load into the tensors in place."""
    dcp.load(dict(tensors), storage_reader=FileSystemReader(folder), no_dist=True)


def save_deepspeed(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Save as DeepSpeed's engine does by default."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    with contextlib.redirect_stdout(io.StringIO()):
        TorchCheckpointEngine().save(tensors, str(folder / "state.pt"))
    sync_path(folder / "state.pt")


def load_deepspeed(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Load as its engine does."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    with contextlib.redirect_stdout(io.StringIO()):
        loaded = TorchCheckpointEngine().load(str(folder / "state.pt"), map_location="cpu")
    for key, tensor in tensors.items():
        tensor.copy_(loaded[key])


OURS, READ_BACK = "longctx", "longctx, read back"
CONTENDERS = {
    OURS: Contender(save_ours, load_ours),
    READ_BACK: Contender(lambda folder, tensors: save_ours(folder, tensors, reads_back=True), load_ours),
    "torch.save": Contender(save_torch, load_torch),
    "safetensors": Contender(save_safetensors, load_safetensors),
    "torch.distributed.checkpoint": Contender(save_distributed, load_distributed),
    "DeepSpeed": Contender(save_deepspeed, load_deepspeed),
}


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache; they are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def measure_files(rounds: int, num_tensors: int) -> dict[str, Any]:
    """Return each contender's minimum seconds to save and to load."""
    tensors = {f"w{n // 3}/{ROLES[n % 3]}": torch.randn(VALUES) for n in range(num_tensors)}
    filled = {key: torch.zeros(VALUES) for key in tensors}
    seconds: dict[str, dict[str, list[float]]] = {name: {"save": [], "load": []} for name in CONTENDERS}
    for _ in range(rounds):
        for name, contender in CONTENDERS.items():
            with tempfile.TemporaryDirectory(prefix="longctx-saving-") as folder_name:
                folder = Path(folder_name)
                began = time.perf_counter()
                contender.save(folder, tensors)
                sync_path(folder)
                seconds[name]["save"].append(time.perf_counter() - began)
                forget(folder)
                for tensor in filled.values():
                    tensor.zero_()
                began = time.perf_counter()
                contender.load(folder, filled)
                seconds[name]["load"].append(time.perf_counter() - began)
                assert all(torch.equal(tensor, filled[key]) for key, tensor in tensors.items()), name
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
    return {
        "gib": round(num_tensors * VALUES * 4 / GIB, 3),
        "seconds": {name: {way: round(min(of), 3) for way, of in found.items()} for name, found in seconds.items()},
    }


def bounds_of(run: dict[str, Any], files: dict[str, Any]) -> list[Bound]:
    """Return the bounds on the results."""
    again = ()
    bounds = [
        Bound("seconds that a save blocks over one that is waited for", run["blocked_share"], BLOCKS, again=again),
        Bound("CPU seconds of a step beside a save over one alone", run["cpu_ratio"], CPU, again=again),
        Bound("memory that saves take, in copies of what a rank owns", run["copies"], COPIES),
    ]
    seconds = files["seconds"]
    for way in ("save", "load"):
        quickest = min(of[way] for name, of in seconds.items() if name not in (OURS, READ_BACK))
        ratio = round(seconds[OURS][way] / quickest, 3)
        bounds.append(Bound(f"seconds to {way} over the quickest peer's", ratio, SLOWER, again=again))
    return bounds


def main() -> int:
    """Print and save the results; return 1 if one is outside its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = parse(parser, "one round each, and files of 192 MiB")
    # The disk and cores are in use by others too: three rounds were too few for either.
    rounds, num_tensors = 6, 66
    if options.quick:
        rounds, num_tensors = 1, 12
    files = measure_files(rounds, num_tensors)
    for name, of in files["seconds"].items():
        print(f"{files['gib']} GiB by {name}: saved in {of['save']} s, loaded in {of['load']} s", flush=True)
    run = measure_run(rounds)
    print(f"a run: {run}", flush=True)
    return conclude("saving", {"ranks": RANKS, "run": run, "files": files}, bounds_of(run, files), options)


if __name__ == "__main__":
    sys.exit(main())
