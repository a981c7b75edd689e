"""A training run's files in a large job: the checkpoint's manifest, metrics, and reading data at a start."""

from __future__ import annotations

import json
import math
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.scaling.figures import Figures, timed
from data_pipeline.rows.epoch_blocks import BlockAssignment
from data_pipeline.rows.pack import Parts, plan_parts
from data_pipeline.shards.shard_verification import assign_shards
from launcher.metrics.expert_load import compact_record, max_violation, mean_violation
from launcher.metrics.record import encode
from launcher.training.data_check import _View
from longctx.checkpoint_format import FORMAT, ROLES, VERSION, CheckpointReader, canonical_hash
from longctx.config import PRESETS, ModelConfig
from longctx.files import MANIFEST
from longctx.model.decoder import Decoder

SHARDS, SHARD_BYTES = 4000, 268_435_456
"""A corpus of 1.07 TB: shards as ``data build`` closes them, 2^26 tokens of four bytes."""
DOCUMENTS = 1_000_000_000
"""Documents in the corpus of the planned epoch block."""
MOST_PIECES = 1_500_000
"""Maximum number of tensor fragments in a manifest that is written and read; larger ones are extrapolated by fragment
count.
"""


def measure_checkpoint(figures: Figures, ranks: int, model: str) -> None:
    """Measure the manifest of the model's checkpoint over this many ranks, partitioned flat (ZeRO 1, 2) and by tensor
    (3).
    """
    sizes = tensor_sizes(PRESETS[model])
    for stage, needed, power in ((2, "tensors + ranks", 1.0), (3, "tensors × ranks", 1.0)):
        pieces = _num_pieces(sizes, ranks, stage)
        measured, scale = ranks, 1.0
        while _num_pieces(sizes, measured, stage) > MOST_PIECES:
            measured //= 2
        if measured < ranks:
            scale = pieces / _num_pieces(sizes, measured, stage)
        case = f"{model}, ZeRO {stage}"
        num_bytes, written, read = _manifest(sizes, measured, stage)
        words: dict[str, Any] = {"needed": needed, "power": power}
        figures.add("checkpoint manifest: pieces", case, ranks, pieces, **words)
        figures.add("checkpoint manifest: size", case, ranks, num_bytes * scale, unit="B", **words)
        figures.add("checkpoint manifest: make and hash", case, ranks, written * scale, unit="s", **words)
        figures.add("checkpoint manifest: read and check", case, ranks, read * scale, unit="s", **words)


def tensor_sizes(config: ModelConfig) -> list[int]:
    """Return each tensor's number of values in a model, built without memory."""
    with torch.device("meta"):
        return [parameter.numel() for parameter in Decoder(config).parameters()]


def _num_pieces(sizes: Sequence[int], ranks: int, stage: int) -> int:
    """Return the number of tensor fragments over all roles."""
    if stage == 3:
        return len(sizes) * ranks * len(ROLES)
    # A flat partition cuts at most one tensor per rank.
    return (len(sizes) + ranks - 1) * len(ROLES)


def _pieces(sizes: Sequence[int], ranks: int, stage: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield tensor, rank, first value and number of values for each tensor fragment."""
    if stage == 3:
        for tensor, size in enumerate(sizes):
            part = -(-size // ranks)
            for rank in range(ranks):
                start = min(rank * part, size)
                yield tensor, rank, start, min(part, size - start)
        return
    ends = np.cumsum(sizes)
    part = -(-int(ends[-1]) // ranks)
    cuts = sorted({*ends.tolist(), *range(part, int(ends[-1]), part)})
    before = 0
    for cut in cuts:
        tensor = int(np.searchsorted(ends, before, side="right"))
        yield tensor, before // part, before - int(ends[tensor] - sizes[tensor]), cut - before
        before = cut


def _manifest(sizes: Sequence[int], ranks: int, stage: int) -> tuple[int, float, float]:
    """Return a manifest's bytes, and CPU seconds to build it, and to read and check it."""
    tensors: dict[str, Any] = {
        f"model.layers.{number}.weight": {"shape": [size], "roles": {role: [] for role in ROLES}}
        for number, size in enumerate(sizes)
    }
    files = {_file(rank): {"bytes": 0, "hash": "0" * 32} for rank in range(ranks)}
    for tensor, rank, start, numel in _pieces(sizes, ranks, stage):
        name = f"model.layers.{tensor}.weight"
        files[_file(rank)]["bytes"] += 4 * numel * len(ROLES)
        for role in ROLES:
            piece = {"file": _file(rank), "key": f"{name}/{role}/{start}", "start": start, "numel": numel}
            tensors[name]["roles"][role].append(piece)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "step": 1,
        "dtype": "bfloat16",
        "model": {},
        "training": {"step": 1},
        "tensors": tensors,
    }
    manifest |= {"files": files}

    def make() -> str:
        manifest["hash"] = canonical_hash(manifest)
        return json.dumps(manifest)

    text, written = timed(make)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / MANIFEST).write_text(text)
        tensors.clear()
        _, read = timed(lambda: CheckpointReader(folder))
    return len(text), written, read


def _file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def measure_metrics(figures: Figures, ranks: int, model: str, *, steps: int = 400) -> None:
    """Return the bytes per step in ``metrics.jsonl``, averaged over ``steps`` steps, and in the step's single
    all-reduce.
    """
    config = PRESETS[model]
    layers = [layer for layer in range(config.num_layers) if config.has_experts(layer)]
    draw = np.random.default_rng(0)
    total = 0
    for step in range(1, steps + 1):
        loads = draw.poisson(2**20 * 8 / max(1, config.num_experts), (len(layers), config.num_experts)).tolist()
        total += len(encode(compact_record(_record(step, layers, loads))))
    words: dict[str, Any] = {"needed": "nothing", "power": 0.0}
    figures.add("metrics.jsonl, a step", model, ranks, total / steps, unit="B", **words)
    # Three sums, a count per expert, six statistics per layer, and the FLOPs: one all-reduce per step.
    reduced = 8 * (3 + len(layers) * (config.num_experts + 6) + 1)
    figures.add("a step's totals, all-reduced", model, ranks, reduced, unit="B", **words)


def _record(step: int, layers: Sequence[int], loads: list[list[int]]) -> dict[str, Any]:
    """Return a train record with every field."""
    figure = [math.pi / (layer + 1) for layer in layers]
    plain = ("loss", "lr", "grad_norm", "tokens_per_second", "step_seconds", "data_wait_seconds", "model_tflops", "mfu")
    return {
        "kind": "train",
        "step": step,
        **dict.fromkeys(plain, math.pi * step),
        "tokens": step * 2**20,
        "max_memory_bytes": 2**36,
        "balance_loss": 1.0 / 3,
        "router_z_loss": 1.0 / 7,
        "expert_layers": list(layers),
        "expert_load": loads,
        "expert_max_violation": [max_violation(counts) for counts in loads],
        "expert_mean_violation": [mean_violation(counts) for counts in loads],
        "expert_dropped_share": figure,
        "router_entropy": figure,
        "router_logit_rms": figure,
        "time": "2026-11-23T06:00:00.000",
    }


def measure_data(figures: Figures, ranks: int) -> None:
    """Measure the bytes a first start reads from a terabyte on a network file system, and the messages ranks exchange
    for it.
    """
    shares, seconds = timed(lambda: assign_shards([SHARD_BYTES] * SHARDS, ranks))
    corpus = f"{SHARDS * SHARD_BYTES / 1e12:.1f} TB in {SHARDS:,} shards"
    most = max(map(len, shares)) * SHARD_BYTES
    figures.add("checksums that a rank reads", corpus, ranks, most, unit="B", needed="1 / ranks", power=-1.0)
    figures.add("checksums dealt out", corpus, ranks, seconds, unit="s", needed="files", power=0.0)
    view = len(pickle.dumps(_View(data=("0" * 32,) * 2, copy="0" * 65, has_pending=True)))
    figures.add("views of the data, gathered", corpus, ranks, view * ranks, unit="B", needed="ranks", power=1.0)


def measure_plan(figures: Figures, ranks: int, *, documents: int = DOCUMENTS) -> None:
    """Measure the plan of an epoch block, which every rank computes. Reading document lengths is in ``data_plan``."""
    deal = BlockAssignment.of(documents, 800 * documents, SHARDS, 131_072)
    own = documents // deal.num_blocks
    lengths = 1 + np.random.default_rng(0).geometric(1 / 800, own)
    plan, seconds = timed(lambda: plan_parts(Parts.whole(np.arange(own), lengths), 131_072))
    kept = sum(part.nbytes for part in vars(plan).values() if isinstance(part, np.ndarray))
    case = f"{own:,} of {documents:,} documents"
    words: dict[str, Any] = {"needed": "nothing", "power": 0.0}
    figures.add("plan of a block", case, ranks, seconds, unit="s", **words)
    figures.add("plan of a block, kept", case, ranks, kept, unit="B", **words)
