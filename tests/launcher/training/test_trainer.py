"""The pure parts of training: schedules and figures."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from launcher.config.sections import TrainSection
from launcher.training.step import learning_rate
from launcher.training.validation import entropy, position_edges


def test_learning_rate_warms_up_and_falls_to_its_floor():
    train = TrainSection(steps=110, warmup_steps=10, lr=1.0, final_lr_ratio=0.1)
    rates = [learning_rate(step, train) for step in range(1, 111)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert rates[59] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(rates[9:]))


def test_no_warm_up_starts_at_the_peak():
    train = TrainSection(steps=10, warmup_steps=0, lr=1.0, final_lr_ratio=1.0)
    assert [learning_rate(step, train) for step in (1, 5, 10)] == [1.0, 1.0, 1.0]


def test_position_bins():
    assert position_edges(1) == [0]
    assert position_edges(9) == [0, 1, 2, 4, 8]
    assert position_edges(8) == [0, 1, 2, 4]


def test_unigram_entropy():
    assert entropy(torch.tensor([5, 5, 0, 0])) == pytest.approx(math.log(2))
    assert entropy(torch.tensor([3, 0])) == 0
    assert math.isnan(entropy(torch.zeros(3, dtype=torch.int64)))
