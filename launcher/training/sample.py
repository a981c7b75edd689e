"""Sample text at a validation: what the model writes after a fixed prompt, greedy, on whatever ranks it lies.

Axes: t tokens of this rank, V vocabulary.
"""

from __future__ import annotations

import torch

from launcher.metrics.record import Record
from launcher.training.run import Run
from longctx.batch import IGNORED_TARGET, PADDING_DOCUMENT, Batch, PackedDocuments
from longctx.tokenizer import Tokenizer
from parallel.comm.world import on_every_rank, sum_over_ranks
from parallel.layout.sequence import num_parts


class Sampler:
    """Writes the sample text of a run's validations."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._tokenizer: Tokenizer = on_every_rank(run.loader.shards.tokenizer)
        self._prompt = run.config.validation.sample_prompt
        self._prompt_ids: list[int] = on_every_rank(lambda: self._tokenizer.encode_prompt(self._prompt))

    def sample(self) -> Record:
        """The prompt, and the text that the model continues it with. Collective."""
        ids = list(self._prompt_ids)
        stops = set(self._tokenizer.special.stops)
        for _ in range(self.run.config.validation.sample_tokens):
            ids.append(self._next(ids))
            if ids[-1] in stops:
                break
        new = [token for token in ids[len(self._prompt_ids) :] if token < self._tokenizer.vocab_size]
        prompt = self._tokenizer.decode(self._prompt_ids)
        whole = self._tokenizer.decode(self._prompt_ids + new)
        return {"prompt": self._prompt, "text": whole[len(prompt) :]}

    @torch.no_grad()
    def _next(self, ids: list[int]) -> int:
        """The likeliest token after ``ids``, the same on every rank. Collective."""
        run = self.run
        # All is read anew for each token, along the path of a validation: that runs on every mesh and at any ZeRO
        # stage, and a few dozen tokens cost less than the validation itself.
        shard = run.shard_batch(self._batch(ids)).to(run.device)
        decoder = run.engine.model.network
        hidden_BtM = decoder(
            shard.tokens,
            shard.positions,
            shard.documents,
            document_ids=shard.document_ids,
            row_tokens=shard.row_tokens,
            placement=shard.placement,
        )
        is_last_t = ((shard.document_ids == 0) & (shard.positions == len(ids) - 1)).flatten()
        # Every rank computes logits, for under ZeRO-3 the head is gathered from all; one rank has the last token.
        at = int(is_last_t.int().argmax())
        likeliest = decoder.logits(hidden_BtM[:, at : at + 1]).flatten().argmax()
        chosen = torch.zeros(1, dtype=torch.int64)
        if bool(is_last_t.any()) and run.mesh.data_rank == 0:
            chosen[0] = int(likeliest)
        return int(sum_over_ranks(chosen))

    def _batch(self, ids: list[int]) -> Batch:
        """One row of the document so far, padded to a length that the ranks of a sequence can split."""
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
