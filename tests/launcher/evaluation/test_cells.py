"""A cell is tried before anything is measured: by one sample, and by all of them where some may have no room."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from launcher.evaluation.cells import _RULER_STEP, try_samples
from longctx.errors import LengthError
from longctx.evaluation.evaluation_task import EvaluationSample, EvaluationTask, too_short

SETTING: Any = None
NEEDED = (100, 110, 103)


@dataclass(frozen=True, kw_only=True)
class Uneven(EvaluationTask):
    """Samples whose shortest prompts need ``NEEDED`` tokens, or ten times as many from RULER's step on."""

    made: list[tuple[int, int]] = field(default_factory=list)

    def samples(self, setting: Any, length: int, count: int, *, start: int = 0) -> Iterator[EvaluationSample]:
        for index in range(start, count):
            needed = NEEDED[index] * (40 if length >= _RULER_STEP else 1)
            if needed > length:
                raise too_short(self.name, length, prompt=needed, answer=0)
            self.made.append((length, index))
            yield EvaluationSample(
                task=self.name, length=length, index=index, prompt="", prompt_tokens=needed, answer_tokens=0,
                answers=(), target="",
            )  # fmt: skip


def made_at(length: int) -> list[tuple[int, int]]:
    task = Uneven(name="uneven", description="", prompt_budget="", answer_tokens=0, rule=lambda *_: 0.0)
    try_samples(SETTING, task, length, len(NEEDED))
    return task.made


@pytest.mark.parametrize("length", [99, 104, 4100, 4399])
def test_one_sample_without_room_is_enough(length):
    with pytest.raises(LengthError):
        made_at(length)


@pytest.mark.parametrize("length", [110, 124, 4400, 5000])
def test_near_the_shortest_prompt_all_are_made(length):
    assert made_at(length) == [(length, 0), *((length, index) for index in range(3))]


@pytest.mark.parametrize("length", [125, 4095, 5120])
def test_with_room_two_are_enough(length):
    assert made_at(length) == [(length, 0), (length * 4 // 5, 0)]


def test_of_a_long_one_a_single_sample_is_made():
    assert made_at(1_048_576) == [(1_048_576, 0)]
