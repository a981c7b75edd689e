"""Rank 0 runs lm-eval and broadcasts requests; the other ranks wait for them and compute their portion.

Tasks, datasets, scores and files exist on rank 0 only. Other ranks see only settings and token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from launcher.checkpoint.tokenizer_checks import padded_vocab_decode
from launcher.evaluation.harness.request_batches import assign_by_cost, by_context, packs
from launcher.evaluation.harness.request_encoder import GenerationRequest
from launcher.evaluation.harness.settings import Settings
from launcher.evaluation.inference_model import build_decoder, fitting_together
from launcher.evaluation.model_source import ModelSource, check_reads_text, open_model
from launcher.evaluation.rank_setup import build_mesh
from longctx.errors import LongCtxError
from longctx.generation import Sampling, StopStrings, generate_batch
from longctx.generation.scoring import Pair, Score, can_share, score_after_context, score_packed
from parallel.comm.world import broadcast_object, gather_objects, on_every_rank, raise_on_all_ranks

REPEATED_TOKENS = 512
"""Context tokens up to which each continuation reads the context again instead of in a separate pass."""
Value = TypeVar("Value")


class HarnessWorker:
    """This rank's model shard and portion of the work. Ranks in a context group share each text."""

    def __init__(self, settings: Settings, model_source: ModelSource, device: torch.device) -> None:
        """Load the model. Collective."""
        self.mesh = build_mesh(model_source.model, context=settings.context, expert=settings.expert)
        self._settings, self._model_source, self._device = settings, model_source, device
        self._decode = padded_vocab_decode(model_source.tokenizer)
        self._model = build_decoder(model_source, self.mesh, getattr(torch, settings.dtype), device)

    def score(self, pairs: Sequence[Pair]) -> dict[int, Score]:
        """Return the scores for this rank's portion of pairs, by index."""
        groups = by_context(pairs)
        # Continuations of one context go to one rank, which reads it once.
        costs = [sum(pairs[index].num_read for index in group) for group in groups]
        mine = [groups[at] for at in sorted(assign_by_cost(costs, self.mesh.data)[self.mesh.data_rank])]
        found: dict[int, Score] = {}
        together: list[int] = []
        for group in mine:
            # Reading a long context once pays off; short pairs are faster packed together.
            if self._packs(pairs, group):
                together += group
                continue
            context, continuations = list(pairs[group[0]].context), [list(pairs[n].continuation) for n in group]
            scores = score_after_context(self._model, context, continuations, chunk_tokens=self._settings.chunk_tokens)
            found.update(zip(group, scores, strict=True))
        for pack in packs([pairs[index].num_read for index in together], self._settings.chunk_tokens):
            indices = [together[at] for at in pack]
            found.update(zip(indices, score_packed(self._model, [pairs[n] for n in indices]), strict=True))
        return found

    def generate(
        self, prompts: Sequence[tuple[int, Sequence[int]]], generation: GenerationRequest, many: int
    ) -> dict[int, str]:
        """Return the texts generated from this rank's portion of prompts, by index.

        ``prompts`` are (number, ids), at least one; a sampled text's seed is the base seed plus its number. Up to
        ``many`` prompts are generated together if they fit in memory. Collective.
        """
        costs = [len(ids) + generation.max_new_tokens for _, ids in prompts]
        mine = sorted(assign_by_cost(costs, self.mesh.data)[self.mesh.data_rank])
        options = self._options(generation)
        found: dict[int, str] = {}
        strategy = generation.strategy
        if isinstance(strategy, Sampling):
            strategy = replace(strategy, seed=self._settings.seed)
        # Use all prompts, not this rank's portion: every rank must pass the same number.
        many = fitting_together(
            self._model_source.model,
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
            strategy,
            numbers=[prompts[index][0] for index in mine],
            max_sequences=many,
            **options,
        )
        for at, new_ids in batch:
            found[mine[at]] = self._text(new_ids, generation)
        return found

    def _packs(self, pairs: Sequence[Pair], group: list[int]) -> bool:
        """Return True if a context's pairs are read in full, each packed in a row with others."""
        # In a context group each rank reads a shard of one text, so rows with several texts are not possible.
        if self.mesh.context > 1 or not can_share(self._model):
            return False
        if max(pairs[index].num_read for index in group) > self._settings.chunk_tokens:
            return False
        return (len(group) - 1) * len(pairs[group[0]].context) <= REPEATED_TOKENS

    def _options(self, generation: GenerationRequest) -> dict[str, Any]:
        options: dict[str, Any] = {
            "penalties": generation.penalties,
            "stop_ids": set(self._model_source.tokenizer.special.stop_ids),
            "chunk_tokens": self._settings.chunk_tokens,
        }
        if generation.until:
            options["stop_strings"] = StopStrings(self._decode, generation.until)
        return options

    def _text(self, ids: list[int], generation: GenerationRequest) -> str:
        # Decode the output alone, as lm-eval does: some tokenizers drop the space before the first token.
        text = self._decode(ids)
        # Generation stops after the token that completes a stop string: cut the text at the first one.
        ends = [at for at in map(text.find, generation.until) if at >= 0]
        return text[: min(ends, default=len(text))]


class Ranks:
    """Ranks in the current process group, if any. All ranks create one at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._worker: HarnessWorker | None = None
        self._is_closed = False

    @property
    def data_degree(self) -> int:
        """Number of texts processed at the same time by different ranks."""
        assert self._worker is not None, "no model is loaded"
        return self._worker.mesh.data

    def load(self, settings: Settings) -> ModelSource:
        """Load a model on all ranks. Called by rank 0."""
        return self._ask("load", settings)

    def score(self, pairs: Sequence[Pair]) -> list[Score]:
        """Return each pair's score. Called by rank 0."""
        return _in_order(self._ask("score", pairs))

    def generate(
        self, prompts: Sequence[tuple[int, Sequence[int]]], generation: GenerationRequest, many: int
    ) -> list[str]:
        """Return the text after each prompt. Called by rank 0."""
        return _in_order(self._ask("generate", prompts, generation, many))

    def end(self) -> None:
        """Release the other ranks. Called by rank 0, even after an error in lm-eval."""
        # After a collective error, the other ranks have stopped listening.
        if not self._is_closed:
            self._is_closed = True
            self._broadcast_request(None)

    def serve(self) -> None:
        """Execute rank 0's requests until it releases this rank. Called by every other rank."""
        while True:
            request = self._broadcast_request(None)
            if request is None:
                return
            name, arguments = request
            self._do(name, arguments)

    def _ask(self, name: str, *arguments: Any) -> Any:
        self._broadcast_request((name, arguments))
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
            self._is_closed = True
            raise

    def _load(self, settings: Settings) -> ModelSource:
        model_source = on_every_rank(lambda: _open_model(settings))
        self._worker = HarnessWorker(settings, model_source, self._device)
        return model_source

    def _gathered(self, action: Callable[[], dict[int, Value]]) -> dict[int, Value]:
        """Gather the results from all ranks' portions."""
        # Hold the error back until all ranks know of it: a rank that raises alone leaves the others waiting.
        problem, found = None, {}
        try:
            found = action()
        except LongCtxError as error:
            problem = error
        # Portions take different times: the control group waits for the longest.
        raise_on_all_ranks(problem)
        # All ranks in a context group have the same results; only its first rank sends them.
        assert self._worker is not None
        if self._worker.mesh.context_rank != 0:
            found = {}
        return {index: value for part in gather_objects(found) for index, value in part.items()}

    def _broadcast_request(self, request: tuple[str, tuple[Any, ...]] | None) -> tuple[str, tuple[Any, ...]] | None:
        """Broadcast rank 0's request to every rank and return it. Collective."""
        # Rank 0 may prepare datasets for hours: the control group waits.
        return broadcast_object(request)


def _open_model(settings: Settings) -> ModelSource:
    model_source = open_model(settings.checkpoint, settings.tokenizer)
    check_reads_text(model_source, "lm_eval")
    settings.limit(model_source.model)
    return model_source


def _in_order(found: dict[int, Value]) -> list[Value]:
    return [found[index] for index in range(len(found))]
