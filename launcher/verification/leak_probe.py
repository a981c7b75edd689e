"""``LeakProbe``: test if documents in a packed row affect each other, in a run's layout, kernel, chunks and mixers."""

from __future__ import annotations

import dataclasses
import time
from functools import partial

import torch
from torch import Tensor

from launcher.config.resolved import ResolvedConfig
from launcher.training.setup import build_engine
from launcher.training.task_builder import shard_batch
from launcher.verification.random_rows import micro_batch, packed_rows, source_rows
from longctx.batch import IGNORED_TARGET, Stream
from longctx.evaluation.document_leaks import Leaks, find_leaks
from parallel.comm.world import gather_objects, sum_over_ranks
from parallel.mesh import Mesh
from parallel.zero.zero_engine import ZeroEngine

_ROUNDING = {"float32": 1e-3, "bfloat16": 0.2}
"""Allowed change from a document's place in its row, in standard deviations of the model's output."""


class LeakProbe:
    """A run's model with random weights, and rows of documents for it to read."""

    def __init__(self, config: ResolvedConfig, mesh: Mesh, device: torch.device) -> None:
        self.config, self.mesh, self.device = config, mesh, device
        self.engine: ZeroEngine = build_engine(config, mesh, accumulation=1)
        self.engine.initialize(config.run.seed)
        rows = config.micro_batches(mesh.world_size).rows(0, 0)
        # The same rows on every data rank: each context group is tested independently.
        self.stream = micro_batch(config, 0, rows)

    def run(self) -> dict[str, Leaks]:
        """Return leaks into token likelihoods, and into document losses in training. Collective.

        Multi-token prediction adds leaks into its losses, and an encoder adds leaks from a source into other documents'
        losses.
        """
        if self.config.model.image.is_used:
            return self._images()
        tokens, documents, source = self.stream.tokens, self.stream.document_ids, self.stream.source
        # A changed token is a target, too.
        vocab_size = self.config.model.head_rows
        found = {
            "likelihoods of tokens": find_leaks(self._token_nll, tokens, documents, vocab_size=vocab_size),
            "losses in training": find_leaks(self._losses, tokens, documents, vocab_size=vocab_size),
        }
        if self.config.train.mtp_weight:
            mtp_losses = partial(self._losses, of="mtp_nll")
            found["losses further ahead"] = find_leaks(mtp_losses, tokens, documents, vocab_size=vocab_size)
        if source is not None:
            ids = source.document_ids
            found["losses, of a source"] = find_leaks(self._of_sources, source.tokens, ids, vocab_size=vocab_size)
        return found

    def _images(self) -> dict[str, Leaks]:
        """Return leaks between images, whose length is fixed: a change is added to a patch, or replaces a color."""
        image, stream, vocab_size = self.config.model.image, self.stream, self.config.model.vocab_size
        inputs = stream.tokens
        if image.patch:
            inputs, vocab_size = torch.zeros_like(stream.tokens), 256
        options = {"vocab_size": vocab_size, "skipped": int(image.class_token), "has_fixed_length": True}

        def changed(tokens: Tensor) -> Stream:
            if stream.pixels is None:
                return dataclasses.replace(stream, tokens=tokens)
            return dataclasses.replace(stream, pixels=stream.pixels + tokens[..., None].to(torch.uint8))

        def likelihoods(tokens: Tensor, document_ids: Tensor) -> Tensor:
            return self._nll_of(changed(tokens))

        def losses(tokens: Tensor, document_ids: Tensor, of: str | None = None) -> Tensor:
            return self._losses_of(changed(tokens), document_ids, of)

        outputs = {"likelihoods": likelihoods, "losses in training": losses}
        if self.config.train.class_weight:
            outputs["losses of classes"] = partial(losses, of="class")
        return {name: find_leaks(of, inputs, stream.document_ids, **options) for name, of in outputs.items()}

    def _token_nll(self, tokens: Tensor, document_ids: Tensor) -> Tensor:
        """Return each token's negative log-likelihood [B, T, 1], gathered from all ranks."""
        return self._nll_of(self._packed(tokens, document_ids))

    def _nll_of(self, stream: Stream) -> Tensor:
        tokens = stream.tokens
        shard = shard_batch(self._with_targets(stream, stream.document_ids >= 0), self.config, self.mesh)
        task = self.engine.model
        own = task.token_nll(task.prepare(shard.to(self.device))).float().cpu()
        # Data ranks hold the same rows: join only this group's shards, in context order.
        parts = gather_objects((self.mesh.data_rank, self.mesh.context_rank, own))
        mine = [part for data_rank, _, part in sorted(parts, key=_place) if data_rank == self.mesh.data_rank]
        whole = shard.placement.join(mine, 1)
        return whole[:, : tokens.numel()].view(*tokens.shape, 1)

    def _with_targets(self, stream: Stream, is_target: Tensor) -> Stream:
        """Return the stream with these tokens counted: their next tokens, or themselves if the objective is masked."""
        if stream.labels is not None:
            stream = dataclasses.replace(stream, labels=stream.labels.masked_fill(~is_target, IGNORED_TARGET))
        if self.config.mask is None:
            return dataclasses.replace(stream, loss_mask=is_target)
        return dataclasses.replace(stream, masked=stream.tokens.masked_fill(~is_target, IGNORED_TARGET))

    def _losses(self, tokens: Tensor, document_ids: Tensor, of: str | None = None) -> Tensor:
        """Return the loss for each token's document [B, T, 1], from the training pass, in chunks if the run has them.

        ``of`` names a sum other than the reported one.
        """
        stream = self._packed(tokens, document_ids)
        return self._losses_of(stream, stream.document_ids, of)

    def _of_sources(self, tokens: Tensor, document_ids: Tensor) -> Tensor:
        """Return, for each source token, the loss for the document that reads it [B, S, 1]."""
        rows, of_row = self.stream.document_ids, []
        for ids in rows:
            of_row.append(len(set(ids[ids >= 0].tolist())))
        stream = dataclasses.replace(self.stream, source=source_rows(tokens, document_ids, of_row))
        return self._losses_of(stream, document_ids)

    def _losses_of(self, stream: Stream, ids: Tensor, of: str | None = None) -> Tensor:
        found = torch.zeros(ids.shape)
        for number in range(stream.documents.num_documents):
            # Only this document's tokens count, so the total is its own loss.
            own = stream.document_ids == number
            if not own.any():
                continue
            shard = shard_batch(self._with_targets(stream, own), self.config, self.mesh).to(self.device)
            task = self.engine.model
            # With gradients, forward takes the training path: chunks, recomputation, offloading.
            with torch.enable_grad():
                sums = self.engine.forward(task.prepare(shard))
            total = sum_over_ranks(sums[of or task.reported].detach().double().cpu())
            found[ids == number] = float(total)
        return found[..., None]

    def _packed(self, tokens: Tensor, document_ids: Tensor) -> Stream:
        return dataclasses.replace(packed_rows(tokens, document_ids), source=self.stream.source)


def probe_text(found: dict[str, Leaks], description: str, started: float, dtype: str) -> tuple[str, bool]:
    """Return the result text, and True if no document leaks."""
    of_tokens = next(iter(found.values()))
    moves = [of.moved for of in found.values() if of.moved is not None]
    has_leak = any(of.leaked_share for of in found.values())
    lines = [
        f"Leak probe of {description}",
        "One token in the first document was changed, at its beginning and at its end. Changes in other documents:",
        f"  likelihoods of tokens   {of_tokens.leaked_share:.1%} of {of_tokens.num_other_tokens:,}",
        *(f"  {name:<24}{of.leaked_share:.1%} of the tokens' documents" for name, of in list(found.items())[1:]),
        f"In the first document's own tokens: {of_tokens.inside_share:.0%}.",
    ]
    if moves:
        lines.append(
            f"With the first document one token shorter, the others' values change by {max(moves):.1e} (relative; "
            f"rounding: up to {_ROUNDING[dtype]:.0e})."
        )
    lines.append(f"{time.perf_counter() - started:.1f} s.")
    # Without an effect on its own document, the changed token proves nothing about the others.
    if not all(of.inside_share for of in found.values()):
        lines.append("The probe is inconclusive: the first document itself did not change.")
    elif has_leak:
        largest = max(of.largest for of in found.values())
        lines.append(f"Documents leak into each other: the largest change is {largest:.1e}.")
    elif not of_tokens.num_other_tokens and not moves:
        lines.append("The probe is inconclusive: a micro-batch has one image.")
    elif moves and not max(moves) <= _ROUNDING[dtype]:
        lines.append("Documents depend on their start in the row: positions continue across a boundary.")
    else:
        lines.append("Nothing leaks.")
    return "\n".join(lines), lines[-1] == "Nothing leaks."


def _place(part: tuple[int, int, Tensor]) -> tuple[int, int]:
    return part[0], part[1]
