"""``generate``: check all input, load the model, continue one prompt or many, in one process or over ranks.

Ranks in a context group share each prompt; groups continue different prompts. Rank 0 reads the prompts and receives all
continuations.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from launcher.checkpoint.tokenizer_checks import padded_vocab_decode
from launcher.evaluation.harness.request_batches import assign_by_cost
from launcher.evaluation.inference_model import build_decoder, fitting_together
from launcher.evaluation.model_source import ModelSource, open_model, open_reader
from launcher.evaluation.rank_setup import build_mesh, joined_ranks
from launcher.generation.chat_prompt_ids import encode_chat_prompts
from launcher.generation.generation_options import GenerationCommandOptions, PromptLine, check_space, encode_prompts
from longctx.errors import ConfigError, LongCtxError
from longctx.generation.beams import Beams
from longctx.generation.continuation import GenerationOptions
from longctx.generation.continuous_batching import MAX_SEQUENCES, generate_batch
from longctx.generation.load_decoder import find_model
from longctx.generation.loop import stream
from longctx.generation.stop_strings import StopStrings
from longctx.model.decoder import Decoder
from longctx.tokenizer.pair_ids import start_of_targets
from parallel.comm.mailbox import Mailbox
from parallel.comm.world import on_every_rank, on_rank_0, raise_on_all_ranks
from parallel.mesh import Mesh


class GenerationSession:
    """Prompts and a model that passed all checks. Every rank must call every method at the same time."""

    def __init__(
        self,
        options: GenerationCommandOptions,
        model_source: ModelSource,
        mesh: Mesh,
        device: torch.device,
        prompts: Sequence[PromptLine],
        prompt_ids: Sequence[array[int]],
        turn_ends: Collection[int],
    ) -> None:
        self.model_source, self.mesh = model_source, mesh
        self.prompts = prompts
        """Prompts on rank 0; empty on the others."""
        self.prompt_ids = prompt_ids
        self.stop_ids = set(model_source.tokenizer.special.stop_ids).union(turn_ends)
        """Ids that end a continuation."""
        self.options = options
        self._device = device
        # With an encoder, the prompt is the source, and the target starts from a single id.
        self._start: int | None = None
        if model_source.model.encoder_layers:
            self._start = start_of_targets(model_source.tokenizer)
        self._model: Decoder | None = None

    def load(self) -> None:
        """Load the model."""
        self._model = build_decoder(self.model_source, self.mesh, getattr(torch, self.options.dtype), self._device)

    def stream(self) -> Iterator[int]:
        """Yield the only prompt's continuation token by token, on every rank."""
        (prompt_ids,) = self.prompt_ids
        return self._streamed(prompt_ids)

    def before(self, prompt_ids: Sequence[int]) -> Sequence[int]:
        """Return the ids before a continuation: the prompt, or the start id if an encoder reads the prompt."""
        if self._start is None:
            return prompt_ids
        return [self._start]

    def answer_prompts(self, ask: Callable[[], array[int] | None]) -> Iterator[tuple[array[int], Iterator[int]]]:
        """Yield prompts that ``ask`` returns on rank 0, with their continuations, until it returns None. Collective."""
        while (prompt_ids := on_rank_0(ask)) is not None:
            yield prompt_ids, self._streamed(prompt_ids)

    def _streamed(self, prompt_ids: Sequence[int]) -> Iterator[int]:
        request = GenerationOptions(max_new_tokens=self.options.max_new_tokens, **self._choosing())
        return stream(self._loaded(), self.before(prompt_ids), request, self._source(prompt_ids))

    def _source(self, prompt_ids: Sequence[int]) -> Sequence[int] | None:
        """Return the ids for the encoder; None without an encoder."""
        if self._start is None:
            return None
        return prompt_ids

    def each(self) -> Iterator[tuple[int, list[int]]]:
        """Yield (prompt, new tokens) on rank 0 in prompt order, each as soon as all earlier ones have ended."""
        model = self._loaded()
        # Approximate cost: tokens to read plus tokens to generate.
        costs = [len(ids) + self.options.max_new_tokens for ids in self.prompt_ids]
        shares, together = Shares(self.mesh, costs), self._together(max(costs))
        yield from shares.in_order(self._generate_shares(model, shares.mine, together))

    def _generate_shares(
        self, model: Decoder, indices: Sequence[int], together: int
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield (prompt, new tokens) for these prompts as each ends."""
        # With more groups than prompts, some groups are idle.
        if not indices:
            return
        prompts = [self.prompt_ids[index] for index in indices]
        sources = None
        if self._start is not None:
            sources = [list(ids) for ids in prompts]
        batch = generate_batch(
            model,
            [list(self.before(ids)) for ids in prompts],
            self.options.max_new_tokens,
            sources=sources,
            numbers=indices,
            max_sequences=together,
            **self._choosing(),
        )
        for at, ids in batch:
            yield indices[at], ids

    def _together(self, num_tokens: int) -> int:
        """Return how many prompts each group continues together; each has ``num_tokens`` with its answer."""
        if self.options.max_sequences is not None:
            return self.options.max_sequences
        # Beams of one prompt already fill the batch.
        if isinstance(self.options.strategy, Beams):
            return 1
        return fitting_together(
            self.model_source.model,
            self.mesh,
            self._device,
            num_tokens,
            dtype=getattr(torch, self.options.dtype),
            chunk_tokens=self.options.chunk_tokens,
            most=MAX_SEQUENCES,
        )

    def _choosing(self) -> dict[str, Any]:
        """Return the arguments for choosing and stopping tokens, for ``stream`` and ``generate_batch``."""
        stop_strings = None
        if self.options.stop_strings:
            stop_strings = StopStrings(padded_vocab_decode(self.model_source.tokenizer), self.options.stop_strings)
        return {
            "strategy": self.options.strategy,
            "penalties": self.options.penalties,
            "stop_ids": self.stop_ids,
            "stop_strings": stop_strings,
            "chunk_tokens": self.options.chunk_tokens,
        }

    def _loaded(self) -> Decoder:
        assert self._model is not None, "load() comes first"
        return self._model


@contextmanager
def session(options: GenerationCommandOptions) -> Iterator[GenerationSession]:
    """Open a session on the ranks that a launcher started, or in this process, within the ``with`` block. Collective.

    User input is checked, equally on all ranks, before any allocation.
    """
    with joined_ranks(options) as device:
        yield _create_session(options, device)


def _create_session(options: GenerationCommandOptions, device: torch.device) -> GenerationSession:
    model_source = on_every_rank(lambda: _open(options))
    mesh = build_mesh(model_source.model, context=options.context, expert=options.expert)
    # A single prompt occupies one context group only.
    if not options.has_many and mesh.data > 1:
        raise ConfigError(
            f"parallel.context={mesh.context} on {mesh.world_size} ranks: a single prompt would leave the other ranks "
            "idle.\nLeave out --parallel.context, or give several prompts: --prompts-file F"
        )
    # Filled on rank 0 only: other ranks need the ids, not the texts.
    prompts: list[PromptLine] = []
    prompt_ids, turn_ends = on_rank_0(lambda: _read_and_check(options, model_source, prompts))
    return GenerationSession(options, model_source, mesh, device, prompts, prompt_ids, turn_ends)


def _open(options: GenerationCommandOptions) -> ModelSource:
    """Open a model of texts; raise ConfigError if it reads images."""
    folder = find_model(options.checkpoint)
    image = open_reader(folder)[1].image
    if image.is_used:
        hint = "Leave out the prompt, and give a picture to continue: --image FILE.png --output NEW.png"
        if image.patch:
            hint = "It reads patches and generates nothing. Evaluate it: longctx evaluate --tasks classes, or probe"
        raise ConfigError(f"{folder} is a model of images (model.image), which reads no prompt.\n{hint}.")
    return open_model(folder, options.tokenizer)


def _read_and_check(
    options: GenerationCommandOptions, model_source: ModelSource, prompts: list[PromptLine]
) -> tuple[list[array[int]], set[int]]:
    """Add the prompts to ``prompts``; return each prompt's ids, and the ids that end a chat reply."""
    source = options.prompts
    prompts += source.read()
    turn_ends: set[int] = set()
    if source.chat and model_source.model.encoder_layers:
        raise ConfigError(
            "--chat needs a decoder-only model, and this one has an encoder: give its source with --prompt."
        )
    if source.chat:
        prompt_ids, turn_ends = encode_chat_prompts(source, prompts, model_source)
    else:
        prompt_ids = encode_prompts(source, prompts, model_source)
    lengths = [len(ids) for ids in prompt_ids]
    check_space(source, lengths, options.max_new_tokens, model_source, allow_longer=options.beyond_positions)
    return prompt_ids, turn_ends


_SECONDS_BETWEEN_LOOKS = 0.05
"""Interval at which an idle rank 0 polls for continuations from other groups."""


class Shares:
    """Prompts per rank group, and delivery of continuations to rank 0."""

    def __init__(self, mesh: Mesh, costs: Sequence[int]) -> None:
        """Divide the prompts by their approximate ``costs``."""
        self._mesh, self._num_prompts = mesh, len(costs)
        # Early prompts first, so that their lines can be written early.
        self.mine = sorted(assign_by_cost(costs, mesh.data)[mesh.data_rank])
        """Prompts for this rank's group."""
        self._found: dict[int, list[int] | None] = {}
        self._upcoming = 0
        """Next prompt in output order."""
        # A single group needs no delivery: rank 0 is in it.
        self._mailbox: Mailbox | None = None
        if mesh.data > 1:
            self._mailbox = Mailbox("continuations")

    def in_order(self, results: Iterable[tuple[int, list[int]]]) -> Iterator[tuple[int, list[int]]]:
        """Yield (prompt, new tokens) from all groups on rank 0 in order, each as soon as all earlier ones have ended.

        ``assign_caches`` yields this group's results in any order; ranks other than 0 only consume it. Collective. A
        LongCtxError in one group is raised on all ranks after the other groups are done.
        """
        problem, missing = None, set(self.mine)
        try:
            for index, ids in results:
                missing.discard(index)
                self._deliver(index, ids)
                yield from self._ready()
        except LongCtxError as error:
            problem = error
        # Report missing continuations, so that rank 0 does not wait for them.
        for index in missing:
            self._deliver(index, None)
        # Poll instead of a collective: groups end at very different times.
        while self._mesh.rank == 0 and self._upcoming < self._num_prompts:
            yield from self._ready()
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        raise_on_all_ranks(problem)

    def _deliver(self, index: int, ids: list[int] | None) -> None:
        """Deliver this group's continuation to rank 0, or None for a failed one."""
        if self._mesh.rank == 0:
            self._found[index] = ids
        # Every rank in a group has the same continuation; its first rank sends it.
        elif self._mesh.context_rank == 0 and self._mailbox is not None:
            self._mailbox.leave(index, ids)

    def _ready(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the next continuations in order, as far as received."""
        while self._mesh.rank == 0 and self._upcoming < self._num_prompts:
            index = self._upcoming
            if index in self._found:
                ids = self._found.pop(index)
            elif self._mailbox is not None and self._mailbox.has(index):
                ids = self._mailbox.take(index)
            else:
                return
            self._upcoming += 1
            if ids is not None:
                yield index, ids
