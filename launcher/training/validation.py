"""Held-out loss: one number, its floor, and how it falls with the distance from the document's start."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from longctx.batch import IGNORED_TARGET
from longctx.compact_batch import CompactBatch
from longctx.objectives.task import Task
from parallel.comm.world import sum_over_ranks


def validate(
    task: Task,
    shards: Iterable[CompactBatch],
    device: torch.device,
    *,
    seq_len: int,
    vocab_size: int,
    bytes_per_token: float | None = None,
    source_names: Sequence[str] = (),
    stops: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """A validation record without its step: loss, unigram entropy, loss by position and by source. Collective.

    None where ``stops``, which all ranks call before each micro-batch and which answers all alike, breaks it off.

    ``bytes_per_token`` are the bytes of text that a token of this data stands for, where they are known;
    ``source_names`` are what the numbers of ``Batch.sources`` stand for. ``shards`` are this rank's tokens of each
    micro-batch, which ``model`` reads on ``device``. Sums are float64, so the loss depends on the number of ranks by
    rounding alone.
    """
    edges = position_edges(seq_len)
    nll_by_bin = torch.zeros(len(edges), dtype=torch.float64)
    targets_by_bin = torch.zeros(len(edges), dtype=torch.int64)
    nll_by_source = torch.zeros(len(source_names), dtype=torch.float64)
    targets_by_source = torch.zeros(len(source_names), dtype=torch.int64)
    histogram = torch.zeros(vocab_size, dtype=torch.int64)
    for shard in shards:
        if stops():
            return None
        batch = shard.unpack(device, task.prepare)
        # float64 on the CPU: bincount in float32 loses a token's share once a bin holds millions of them.
        nll = task.token_nll(batch).flatten().double().cpu()
        targets, positions = (x.flatten().cpu() for x in (batch.targets, batch.positions))
        counted = targets != IGNORED_TARGET
        # Positions travel with the tokens, so any layout counts them into the same bins.
        bins = torch.bucketize(positions, torch.tensor(edges), right=True)[counted] - 1
        nll_by_bin += torch.bincount(bins, nll[counted], minlength=len(edges))
        targets_by_bin += torch.bincount(bins, minlength=len(edges))
        if batch.sources is not None:
            # Only documents have targets: no number here is that of padding.
            sources = batch.sources[batch.document_ids.flatten().cpu()[counted]]
            nll_by_source += torch.bincount(sources, nll[counted], minlength=len(source_names))
            targets_by_source += torch.bincount(sources, minlength=len(source_names))
        histogram += torch.bincount(targets[counted], minlength=vocab_size)
    for total in (nll_by_bin, targets_by_bin, nll_by_source, targets_by_source, histogram):
        sum_over_ranks(total)
    num_targets = int(targets_by_bin.sum())
    loss = float(nll_by_bin.sum()) / max(1, num_targets)
    bits_per_byte = None
    if bytes_per_token:
        bits_per_byte = loss / math.log(2) / bytes_per_token
    record = {
        "kind": "validation",
        "loss": loss,
        "bits_per_byte": bits_per_byte,
        "unigram_entropy": entropy(histogram),
        "num_targets": num_targets,
        "loss_by_position": _by_position(edges, seq_len, nll_by_bin, targets_by_bin),
    }
    # Of a mixture of one source the loss says it.
    if len(source_names) > 1:
        record["loss_by_source"] = _by_source(source_names, nll_by_source, targets_by_source)
    return record


def position_edges(seq_len: int) -> list[int]:
    """Starts of the position bins: 0, 1, 2, 4, 8, … below ``seq_len``."""
    return [0] + [2**n for n in range(max(0, seq_len - 1).bit_length())]


def entropy(histogram: Tensor) -> float:
    """−Σ p·ln p in nats of the distribution a histogram shows: the loss of the best model that knows no context."""
    total = int(histogram.sum())
    if not total:
        return math.nan
    p = histogram[histogram > 0].double() / total
    return float(-(p * p.log()).sum())


def _by_source(names: Sequence[str], nll: Tensor, targets: Tensor) -> dict[str, dict[str, Any]]:
    """Loss and targets of each source that has any."""
    return {
        name: {"loss": float(nll[i]) / int(targets[i]), "num_targets": int(targets[i])}
        for i, name in enumerate(names)
        if targets[i]
    }


def _by_position(edges: list[int], seq_len: int, nll: Tensor, targets: Tensor) -> list[dict[str, Any]]:
    """A dictionary for each bin that has targets; a bin without any has no loss."""
    stops = edges[1:]
    stops.append(seq_len)
    return [
        {"start": start, "stop": stop, "loss": float(nll[i]) / int(targets[i]), "num_targets": int(targets[i])}
        for i, (start, stop) in enumerate(zip(edges, stops, strict=True))
        if targets[i]
    ]
