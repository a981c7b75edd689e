"""A loaded model that scores and continues token ids: what every rank does of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from launcher.checkpoint.tokenizers import known_decoder
from launcher.evaluation.harness.batches import by_context, deal_by_cost, packs
from launcher.evaluation.harness.requests import Generation
from launcher.evaluation.harness.settings import Settings
from launcher.evaluation.memory import fitting_together
from launcher.evaluation.model import build_decoder
from launcher.evaluation.opened import OpenedModel
from launcher.evaluation.ranks import build_mesh
from longctx.generation import Beams, Greedy, Sample, StopStrings, generate, generate_batch
from longctx.generation.scoring import Pair, Score, can_share, score_behind, score_packed

REPEATED_TOKENS = 512
"""Tokens of a context that are read again with each of its continuations, rather than in a pass of their own."""


class Worker:
    """This rank's part of the model, and its share of the work. Ranks of a context group work on one text together."""

    def __init__(self, settings: Settings, opened: OpenedModel, device: torch.device) -> None:
        """Load the model. Collective."""
        self.mesh = build_mesh(settings, opened.model)
        self._settings, self._opened, self._device = settings, opened, device
        self._decode = known_decoder(opened.tokenizer)
        self._model = build_decoder(opened, self.mesh, getattr(torch, settings.dtype), device)

    def score(self, pairs: Sequence[Pair]) -> dict[int, Score]:
        """The score of each pair of this rank's share, by its index."""
        groups = by_context(pairs)
        # Continuations of one context go to one rank, which reads it once.
        costs = [sum(pairs[index].num_read for index in group) for group in groups]
        mine = [groups[at] for at in sorted(deal_by_cost(costs, self.mesh.data)[self.mesh.data_rank])]
        found: dict[int, Score] = {}
        together: list[int] = []
        for group in mine:
            if self._packs(pairs, group):
                together += group
                continue
            context, continuations = list(pairs[group[0]].context), [list(pairs[n].continuation) for n in group]
            scores = score_behind(self._model, context, continuations, chunk_tokens=self._settings.chunk_tokens)
            found.update(zip(group, scores, strict=True))
        for pack in packs([pairs[index].num_read for index in together], self._settings.chunk_tokens):
            indices = [together[at] for at in pack]
            found.update(zip(indices, score_packed(self._model, [pairs[n] for n in indices]), strict=True))
        return found

    def generate(
        self, prompts: Sequence[tuple[int, Sequence[int]]], generation: Generation, many: int
    ) -> dict[int, str]:
        """The text after each prompt of this rank's share, by its index.

        ``prompts`` are (number, ids), at least one; what is sampled is drawn from the seed plus the number. ``many``
        are under way together where there is memory for so many. Collective.
        """
        costs = [len(ids) + generation.max_new_tokens for _, ids in prompts]
        mine = sorted(deal_by_cost(costs, self.mesh.data)[self.mesh.data_rank])
        options = self._options(generation)
        found: dict[int, str] = {}
        if isinstance(generation.strategy, Sample):
            # The same prompt twice, which some tasks ask for, must not give the same text twice.
            for index in mine:
                number, ids = prompts[index]
                strategy = replace(generation.strategy, seed=self._settings.seed + number)
                new_ids = generate(self._model, list(ids), generation.max_new_tokens, strategy, **options)
                found[index] = self._text(new_ids, generation)
            return found
        assert isinstance(generation.strategy, (Greedy, Beams))
        # Of all prompts and not of this rank's share: every rank asks for as many.
        many = fitting_together(
            self._opened.model,
            self.mesh,
            self._device,
            max(costs),
            dtype=getattr(torch, self._settings.dtype),
            chunk_tokens=self._settings.chunk_tokens,
            most=many,
        )
        batch = generate_batch(
            self._model,
            [list(prompts[index][1]) for index in mine],
            generation.max_new_tokens,
            generation.strategy,
            max_sequences=many,
            **options,
        )
        for at, new_ids in batch:
            found[mine[at]] = self._text(new_ids, generation)
        return found

    def _packs(self, pairs: Sequence[Pair], group: list[int]) -> bool:
        """Whether the pairs of one context are read whole, each in a row with others."""
        # Of a context group each rank reads its part of one text: rows of several texts have no cache to share.
        if self.mesh.context > 1 or not can_share(self._model):
            return False
        if max(pairs[index].num_read for index in group) > self._settings.chunk_tokens:
            return False
        return (len(group) - 1) * len(pairs[group[0]].context) <= REPEATED_TOKENS

    def _options(self, generation: Generation) -> dict[str, Any]:
        options: dict[str, Any] = {
            "penalties": generation.penalties,
            "stop_ids": set(self._opened.tokenizer.special.stops),
            "chunk_tokens": self._settings.chunk_tokens,
        }
        if generation.until:
            options["stop_strings"] = StopStrings(self._decode, generation.until)
        return options

    def _text(self, ids: list[int], generation: Generation) -> str:
        """The text of new tokens, to the first stop string."""
        # By itself, as lm-eval decodes it: some tokenizers drop the space before whatever they decode first.
        text = self._decode(ids)
        ends = [at for at in map(text.find, generation.until) if at >= 0]
        return text[: min(ends, default=len(text))]
