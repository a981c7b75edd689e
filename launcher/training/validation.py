"""Held-out loss: one number, a floor to compare it with, and its values by position in the document."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from launcher.metrics.record import Record
from launcher.training.run_state import TrainingRun
from launcher.training.task_builder import shard_batch
from longctx.batch import IGNORED_TARGET, PADDING_DOCUMENT, Batch, PackedDocuments
from longctx.compact_batch import CompactBatch
from longctx.objectives.routed_task import hidden_states
from longctx.objectives.task import Task
from longctx.tokenizer import Tokenizer
from longctx.tokenizer.pair_ids import source_ids, start_of_targets
from parallel.comm.world import on_every_rank, sum_over_ranks
from parallel.layout.sequence import num_parts


def validate(
    task: Task,
    shards: Iterable[CompactBatch],
    device: torch.device,
    *,
    seq_len: int,
    vocab_size: int,
    bytes_per_token: float | None = None,
    source_names: Sequence[str] = (),
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Compute a validation record without its step: loss, unigram entropy, loss by position and source. Collective.

    Return None if ``should_stop`` interrupts it. All ranks call ``should_stop`` before each micro-batch, with the same
    result.

    ``vocab_size`` bounds the targets. ``bytes_per_token`` is this data's mean number of text bytes per token, if known;
    ``source_names`` are the names for the numbers in ``Batch.sources``. ``shards`` are this rank's tokens from each
    micro-batch, which ``task`` reads on ``device``. Sums are float64, so the loss depends on the number of ranks by
    rounding only.
    """
    edges = position_edges(seq_len)
    nll_by_bin = torch.zeros(len(edges), dtype=torch.float64)
    targets_by_bin = torch.zeros(len(edges), dtype=torch.int64)
    nll_by_source = torch.zeros(len(source_names), dtype=torch.float64)
    targets_by_source = torch.zeros(len(source_names), dtype=torch.int64)
    histogram = torch.zeros(vocab_size, dtype=torch.int64)
    right, accuracy, has_frequencies = torch.zeros(1, dtype=torch.int64), "", True
    for shard in shards:
        if should_stop():
            return None
        batch = shard.unpack(device, task.prepare)
        # float64 on the CPU: in float32 bincount loses a token's loss once a bin holds millions of them.
        scores = task.score(batch)
        nll = scores.nll_Bt.flatten().double().cpu()
        scored_Bt = batch.targets
        if scores.targets_Bt is not None:
            # Which reply is preferred does not follow from frequencies.
            scored_Bt, has_frequencies = scores.targets_Bt, False
        targets, positions = (x.flatten().cpu() for x in (scored_Bt, batch.positions))
        is_target = targets != IGNORED_TARGET
        # Positions are passed along with the tokens, so any layout counts them into the same bins.
        bins = torch.bucketize(positions, torch.tensor(edges), right=True)[is_target] - 1
        nll_by_bin += torch.bincount(bins, nll[is_target], minlength=len(edges))
        targets_by_bin += torch.bincount(bins, minlength=len(edges))
        if batch.sources is not None:
            # Only documents have targets, so padding contributes no number here.
            sources = batch.sources[batch.document_ids.flatten().cpu()[is_target]]
            nll_by_source += torch.bincount(sources, nll[is_target], minlength=len(source_names))
            targets_by_source += torch.bincount(sources, minlength=len(source_names))
        histogram += torch.bincount(targets[is_target], minlength=vocab_size)
        if scores.right_Bt is not None:
            accuracy = scores.accuracy
            right += scores.right_Bt.sum().cpu()
    for total in (nll_by_bin, targets_by_bin, nll_by_source, targets_by_source, histogram, right):
        sum_over_ranks(total)
    num_targets = int(targets_by_bin.sum())
    loss = float(nll_by_bin.sum()) / num_targets if num_targets else None
    bits_per_byte = None
    if bytes_per_token and loss is not None:
        bits_per_byte = loss / math.log(2) / bytes_per_token
    record = {
        "kind": "validation",
        "loss": loss,
        "bits_per_byte": bits_per_byte,
        "unigram_entropy": entropy(histogram),
        "num_targets": num_targets,
        "loss_by_position": _by_position(edges, seq_len, nll_by_bin, targets_by_bin),
    }
    if accuracy and num_targets:
        record[accuracy] = int(right) / num_targets
    if not has_frequencies:
        record["unigram_entropy"] = None
    # For a mixture with one source it equals the loss.
    if len(source_names) > 1:
        record["loss_by_source"] = _by_source(source_names, nll_by_source, targets_by_source)
    return record


def position_edges(seq_len: int) -> list[int]:
    """Return the position bins' starts: 0, 1, 2, 4, 8, … below ``seq_len``."""
    return [0] + [2**n for n in range(max(0, seq_len - 1).bit_length())]


def entropy(histogram: Tensor) -> float | None:
    """Return −Σ p·ln p in nats for a histogram's distribution, the loss of the best model without context.

    Return None if the histogram is empty.
    """
    total = int(histogram.sum())
    if not total:
        return None
    p = histogram[histogram > 0].double() / total
    return float(-(p * p.log()).sum())


def _by_source(names: Sequence[str], nll: Tensor, targets: Tensor) -> dict[str, dict[str, Any]]:
    return {
        name: {"loss": float(nll[i]) / int(targets[i]), "num_targets": int(targets[i])}
        for i, name in enumerate(names)
        if targets[i]
    }


def _by_position(edges: list[int], seq_len: int, nll: Tensor, targets: Tensor) -> list[dict[str, Any]]:
    """Return a dictionary for each bin with targets; leave out other bins."""
    ends = edges[1:]
    ends.append(seq_len)
    return [
        {"start": start, "stop": stop, "loss": float(nll[i]) / int(targets[i]), "num_targets": int(targets[i])}
        for i, (start, stop) in enumerate(zip(edges, ends, strict=True))
        if targets[i]
    ]


class TextSampler:
    """Text sampler for a run's validations."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self._tokenizer: Tokenizer = on_every_rank(run.loader.shards.tokenizer)
        self._prompt = run.config.validation.sample_prompt
        self._source_ids: list[int] = []
        self._prompt_ids: list[int] = on_every_rank(self._encoded)

    def _encoded(self) -> list[int]:
        """Return the prompt's ids; with an encoder it is the source, and the output begins with a start token."""
        if not self.run.model.encoder_layers:
            return self._tokenizer.encode_prompt(self._prompt)
        self._source_ids = source_ids(self._tokenizer, self._prompt)
        return [start_of_targets(self._tokenizer)]

    def sample(self) -> Record:
        """Return the prompt, and the model's continuation or output. Collective."""
        ids = list(self._prompt_ids)
        stop_ids = set(self._tokenizer.special.stop_ids)
        for _ in range(self.run.config.validation.sample_tokens):
            ids.append(self._next(ids))
            if ids[-1] in stop_ids:
                break
        new = [token for token in ids[len(self._prompt_ids) :] if token < self._tokenizer.vocab_size]
        prompt = self._tokenizer.decode(self._prompt_ids)
        whole = self._tokenizer.decode(self._prompt_ids + new)
        return {"prompt": self._prompt, "text": whole[len(prompt) :]}

    @torch.no_grad()
    def _next(self, ids: list[int]) -> int:
        """Return the most likely token after ``ids``, the same on every rank. Collective."""
        run = self.run
        # All ids are read again for each token, as in validation: that works on every mesh and ZeRO stage, and a few
        # dozen tokens cost less than the validation itself.
        shard = shard_batch(self._batch(ids), run.config, run.mesh).to(run.device)
        decoder = run.engine.model.network
        hidden_BtM = hidden_states(decoder, shard)
        is_last_t = ((shard.document_ids == 0) & (shard.positions == len(ids) - 1)).flatten()
        # Every rank computes logits, since ZeRO-3 gathers the head from all ranks; one rank has the last token.
        at = int(is_last_t.int().argmax())
        best_token = decoder.logits(hidden_BtM[:, at : at + 1]).flatten().argmax()
        # Exactly one rank adds the token, so the sum broadcasts it.
        chosen = torch.zeros(1, dtype=torch.int64)
        if bool(is_last_t.any()) and run.mesh.data_rank == 0:
            chosen[0] = int(best_token)
        return int(sum_over_ranks(chosen))

    def _batch(self, ids: list[int]) -> Batch:
        batch = self._row(ids)
        if self._source_ids:
            batch = replace(batch, source=self._row(self._source_ids))
        return batch

    def _row(self, ids: list[int]) -> Batch:
        """Return one row with a document, padded to a length that a context group can split."""
        parallel = self.run.config.parallel
        parts = num_parts(parallel.layout, parallel.context, parallel.ulysses)
        padding = -len(ids) % parts
        positions = torch.cat((torch.arange(len(ids)), torch.arange(padding)))
        bounds = [0, len(ids)]
        if padding:
            bounds.append(len(ids) + padding)
        document_ids = torch.zeros(len(positions), dtype=torch.int64)
        document_ids[len(ids) :] = PADDING_DOCUMENT
        return Batch(
            tokens=torch.tensor([ids + [0] * padding]),
            targets=torch.full((1, len(positions)), IGNORED_TARGET),
            positions=positions[None],
            document_ids=document_ids[None],
            documents=PackedDocuments.of(bounds),
        )
