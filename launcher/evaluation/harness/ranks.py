"""Rank 0 runs lm-eval and broadcasts requests; the other ranks wait for them and compute their share.

Tasks, datasets, scores and files exist on rank 0 only. Other ranks see only settings and token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from launcher.checkpoint.tokenizers import known_decoder
from launcher.evaluation.harness.batches import by_context, deal_by_cost, packs
from launcher.evaluation.harness.requests import Generation
from launcher.evaluation.harness.settings import Settings
from launcher.evaluation.model import build_decoder, fitting_together
from launcher.evaluation.opened import OpenedModel, check_reads_text, open_model
from launcher.evaluation.ranks import build_mesh
from longctx.errors import LongCtxError
from longctx.generation import Beams, Greedy, Sample, StopStrings, generate, generate_batch
from longctx.generation.scoring import Pair, Score, can_share, score_behind, score_packed
from parallel.comm.world import agree_or_raise, broadcast_object, gather_objects, on_every_rank

REPEATED_TOKENS = 512
"""Context tokens up to which each continuation reads the context again instead of in a separate pass."""
Value = TypeVar("Value")


class Worker:
    """This rank's model shard and share of the work. Ranks in a context group share each text."""

    def __init__(self, settings: Settings, opened: OpenedModel, device: torch.device) -> None:
        """Load the model. Collective."""
        self.mesh = build_mesh(opened.model, context=settings.context, expert=settings.expert)
        self._settings, self._opened, self._device = settings, opened, device
        self._decode = known_decoder(opened.tokenizer)
        self._model = build_decoder(opened, self.mesh, getattr(torch, settings.dtype), device)

    def score(self, pairs: Sequence[Pair]) -> dict[int, Score]:
        """Return the scores for this rank's share of pairs, by index."""
        groups = by_context(pairs)
        # Continuations of one context go to one rank, which reads it once.
        costs = [sum(pairs[index].num_read for index in group) for group in groups]
        mine = [groups[at] for at in sorted(deal_by_cost(costs, self.mesh.data)[self.mesh.data_rank])]
        found: dict[int, Score] = {}
        together: list[int] = []
        for group in mine:
            # Reading a long context once pays off; short pairs are faster packed together.
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
        """Return the texts generated from this rank's share of prompts, by index.

        ``prompts`` are (number, ids), at least one; a sampled text's seed is the base seed plus its number. Up to
        ``many`` prompts are generated together if they fit in memory. Collective.
        """
        costs = [len(ids) + generation.max_new_tokens for _, ids in prompts]
        mine = sorted(deal_by_cost(costs, self.mesh.data)[self.mesh.data_rank])
        options = self._options(generation)
        found: dict[int, str] = {}
        if isinstance(generation.strategy, Sample):
            # Tasks may repeat a prompt, and the copies must get different texts.
            for index in mine:
                number, ids = prompts[index]
                strategy = replace(generation.strategy, seed=self._settings.seed + number)
                new_ids = generate(self._model, list(ids), generation.max_new_tokens, strategy, **options)
                found[index] = self._text(new_ids, generation)
            return found
        assert isinstance(generation.strategy, (Greedy, Beams))
        # Use all prompts, not this rank's share: every rank must pass the same number.
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
        """Return True if a context's pairs are read in full, each packed in a row with others."""
        # In a context group each rank reads a part of one text, so rows with several texts are not possible.
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
        # Decode the output alone, as lm-eval does: some tokenizers drop the space before the first token.
        text = self._decode(ids)
        # Generation stops after the token that completes a stop string: cut the text at the first one.
        ends = [at for at in map(text.find, generation.until) if at >= 0]
        return text[: min(ends, default=len(text))]


class Ranks:
    """Ranks in the current process group, if any. All ranks create one at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._worker: Worker | None = None
        self._has_ended = False

    @property
    def data_degree(self) -> int:
        """Number of texts processed at the same time by different ranks."""
        assert self._worker is not None, "no model is loaded"
        return self._worker.mesh.data

    def load(self, settings: Settings) -> OpenedModel:
        """Load a model on all ranks. Called by rank 0."""
        return self._ask("load", settings)

    def score(self, pairs: Sequence[Pair]) -> list[Score]:
        """Return each pair's score. Called by rank 0."""
        return _in_order(self._ask("score", pairs))

    def generate(self, prompts: Sequence[tuple[int, Sequence[int]]], generation: Generation, many: int) -> list[str]:
        """Return the text after each prompt. Called by rank 0."""
        return _in_order(self._ask("generate", prompts, generation, many))

    def end(self) -> None:
        """Release the other ranks. Called by rank 0, even after an error in lm-eval."""
        # After a collective error, the other ranks have stopped listening.
        if not self._has_ended:
            self._has_ended = True
            self._tell(None)

    def serve(self) -> None:
        """Execute rank 0's requests until it releases this rank. Called by every other rank."""
        while True:
            asked = self._tell(None)
            if asked is None:
                return
            name, arguments = asked
            self._do(name, arguments)

    def _ask(self, name: str, *arguments: Any) -> Any:
        self._tell((name, arguments))
        return self._do(name, arguments)

    def _do(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Execute one request together with all ranks and return its result."""
        try:
            if name == "load":
                return self._load(*arguments)
            assert self._worker is not None, "no model is loaded"
            return self._gathered(lambda: getattr(self._worker, name)(*arguments))
        except BaseException:
            # All ranks raise an error that occurs on one of them, or lose contact with it: they have stopped listening.
            self._has_ended = True
            raise

    def _load(self, settings: Settings) -> OpenedModel:
        opened = on_every_rank(lambda: _opened(settings))
        self._worker = Worker(settings, opened, self._device)
        return opened

    def _gathered(self, action: Callable[[], dict[int, Value]]) -> dict[int, Value]:
        """Gather results from all ranks' shares."""
        # Hold the error back until all ranks know of it: a rank that raises alone leaves the others waiting.
        problem, found = None, {}
        try:
            found = action()
        except LongCtxError as error:
            problem = error
        # Shares take different times: the control group waits for the longest.
        agree_or_raise(problem)
        # All ranks in a context group have the same results; only its first rank sends them.
        assert self._worker is not None
        if self._worker.mesh.context_rank != 0:
            found = {}
        return {index: value for part in gather_objects(found) for index, value in part.items()}

    def _tell(self, asked: tuple[str, tuple[Any, ...]] | None) -> tuple[str, tuple[Any, ...]] | None:
        """Broadcast rank 0's request to every rank and return it. Collective."""
        # Rank 0 may prepare datasets for hours: the control group waits.
        return broadcast_object(asked)


def _opened(settings: Settings) -> OpenedModel:
    opened = open_model(settings.checkpoint, settings.tokenizer)
    check_reads_text(opened, "lm_eval")
    settings.limit(opened.model)
    return opened


def _in_order(found: dict[int, Value]) -> list[Value]:
    return [found[index] for index in range(len(found))]
