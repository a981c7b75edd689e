"""Learning rate for each step."""

from __future__ import annotations

import math

from launcher.config.config_sections import TrainSection


def learning_rate(step: int, train: TrainSection) -> float:
    """Return the rate for the ``step``-th step (from 1): linear warm-up, then cosine decay from ``lr`` to
    ``final_lr_ratio`` times ``lr``, or ``lr`` times the root of warm-up steps over steps (arXiv 1706.03762 §5.3).
    """
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    if train.schedule == "inverse_sqrt":
        return train.lr * math.sqrt(train.warmup_steps / step)
    # max(1, …): a run with warm-up only has no cosine to divide.
    progress = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    floor = train.final_lr_ratio
    return train.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
