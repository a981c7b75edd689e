"""Rank 0 runs lm-eval and asks; the other ranks wait for what it asks, and do their part.

Tasks, data sets, scores and files are rank 0's alone. The others see settings and token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from launcher.evaluation.harness.requests import Generation
from launcher.evaluation.harness.settings import Settings
from launcher.evaluation.harness.worker import Worker
from launcher.evaluation.opened import OpenedModel, open_model
from longctx.errors import LongCtxError
from longctx.generation.scoring import Pair, Score
from parallel.comm.world import agree_or_raise, broadcast_object, gather_objects, on_every_rank

Value = TypeVar("Value")


class Ranks:
    """The ranks of the process group that is there, if any. All of them make one, at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._worker: Worker | None = None
        self._has_ended = False

    @property
    def data_degree(self) -> int:
        """How many texts are worked on at once by different ranks."""
        assert self._worker is not None, "no model is loaded"
        return self._worker.mesh.data

    def load(self, settings: Settings) -> OpenedModel:
        """Load a model on all ranks. Rank 0 calls this."""
        return self._ask("load", settings)

    def score(self, pairs: Sequence[Pair]) -> list[Score]:
        """The score of each pair. Rank 0 calls this."""
        return _in_order(self._ask("score", pairs))

    def generate(self, prompts: Sequence[tuple[int, Sequence[int]]], generation: Generation, many: int) -> list[str]:
        """The text after each prompt. Rank 0 calls this."""
        return _in_order(self._ask("generate", prompts, generation, many))

    def end(self) -> None:
        """Let the other ranks go. Rank 0 calls this, however lm-eval ended."""
        # After an error that all ranks met, none of them listens any more.
        if not self._has_ended:
            self._has_ended = True
            self._tell(None)

    def serve(self) -> None:
        """Do what rank 0 asks, until it lets go. Every other rank calls this."""
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
        """Do one thing together with all ranks, and have its result."""
        try:
            if name == "load":
                return self._load(*arguments)
            assert self._worker is not None, "no model is loaded"
            return self._gathered(lambda: getattr(self._worker, name)(*arguments))
        except BaseException:
            # All ranks raise what one of them met, or lose contact with it: nobody listens any more.
            self._has_ended = True
            raise

    def _load(self, settings: Settings) -> OpenedModel:
        opened = on_every_rank(lambda: _opened(settings))
        self._worker = Worker(settings, opened, self._device)
        return opened

    def _gathered(self, action: Callable[[], dict[int, Value]]) -> dict[int, Value]:
        """What the ranks found, each in its share."""
        problem, found = None, {}
        try:
            found = action()
        except LongCtxError as error:
            problem = error
        # Shares take unequal times: the control group waits for the longest.
        agree_or_raise(problem)
        # All ranks of a context group have the same; one of them speaks.
        assert self._worker is not None
        if self._worker.mesh.context_rank != 0:
            found = {}
        return {index: value for part in gather_objects(found) for index, value in part.items()}

    def _tell(self, asked: tuple[str, tuple[Any, ...]] | None) -> tuple[str, tuple[Any, ...]] | None:
        """What rank 0 says, on every rank. Collective."""
        # Rank 0 may prepare data sets for hours: the control group waits.
        return broadcast_object(asked)


def _opened(settings: Settings) -> OpenedModel:
    opened = open_model(settings.checkpoint, settings.tokenizer)
    settings.limit(opened.model)
    return opened


def _in_order(found: dict[int, Value]) -> list[Value]:
    return [found[index] for index in range(len(found))]
