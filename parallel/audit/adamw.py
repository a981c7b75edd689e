"""AdamW update for a range of weights: as the optimizer computed it, and recomputed.

The update applies the same formula to every value, so a range gets the same bits as within the full tensor.
``is_elementwise`` verifies this on a machine: a kernel may treat the end of a range differently.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor

from parallel.audit.call_sample import UPDATE, CallSample, Place
from parallel.audit.tensor_copies import Copied, extract_tensors
from parallel.zero.optimizer import AdamW

_MOMENTS = ("exp_avg", "exp_avg_sq")
_OPTIONS = ("lr", "betas", "eps", "weight_decay", "fused")
_TENSORS = 7
"""Copied tensors per range: weight, gradient and two moments before, weight and moments after."""


class UpdateCapture:
    """Context manager that copies one range from an optimizer update, before and after it."""

    def __init__(self, optimizer: torch.optim.Optimizer, rng: Random, limit_bytes: int) -> None:
        """Choose the range with ``rng``; copies use at most ``limit_bytes``."""
        self._optimizer, self._rng, self._limit = optimizer, rng, limit_bytes
        self._seen = 0
        self._sampled: tuple[Tensor, slice, dict[str, Any], list[Copied]] | None = None
        """Weights, range, options, and copies of weight, gradient, moments and step."""
        self.sample: CallSample | None = None
        self.master: Tensor | None = None
        """Sampled tensor, whose name is resolved later."""
        self.start = 0

    def __enter__(self) -> UpdateCapture:
        # Hooks on PyTorch's optimizer, which every ZeRO stage calls last: gradients are already reduced and clipped.
        self._hooks = [
            self._optimizer.register_step_pre_hook(self._before),
            self._optimizer.register_step_post_hook(self._after),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # Stage 3 calls the optimizer once per sub-group: reservoir sampling with one slot, all equally likely.
        self._sampled = None
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None or not p.numel():
                    continue
                self._seen += 1
                if self._rng.random() * self._seen < 1:
                    self._draw(optimizer, group, p)

    def _draw(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], p: Tensor) -> None:
        count = min(p.numel(), max(1, self._limit // (_TENSORS * p.element_size())))
        start = self._rng.randrange(p.numel() - count + 1)
        part, state = slice(start, start + count), optimizer.state.get(p) or {}
        # Moments exist only after the first step; AdamW starts from zeros.
        moments = [state.get(name, torch.zeros_like(p)) for name in _MOMENTS]
        step = state.get("step", torch.tensor(0.0))
        tensors = [p, p.grad]
        tensors += moments
        tensors = [x.detach().reshape(-1)[part] for x in tensors if x is not None]
        # A copy: AdamW increments it in place.
        tensors.append(torch.as_tensor(step))
        options = {name: group.get(name) for name in _OPTIONS}
        self._sampled = (p, part, options, [Copied.of(x) for x in tensors])

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # Another sub-group's update, or an empty one.
        if self._sampled is None:
            return
        (p, part, options, inputs), self._sampled = self._sampled, None
        state = optimizer.state[p]
        after = [p] + [state[name] for name in _MOMENTS]
        results = [x.detach().reshape(-1)[part].clone() for x in after]
        # Every argument is a tensor; only their number matters.
        args = extract_tensors([torch.empty(0)] * len(inputs), [])
        place = Place("update", f"AdamW of {part.stop - part.start} values", "", None, "")
        # The engine resolves the name of the weights in this range later.
        self.master, self.start = p, part.start
        self.sample = CallSample(op=UPDATE, args=args, kwargs=options, inputs=inputs, outputs=results, place=place)


def updated(
    master: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, **options: Any
) -> list[Tensor]:
    """Return weights and moments after one AdamW step from these values."""
    master.requires_grad_()
    master.grad = gradient
    # The same class and options as in the run (``Wrapping``).
    options["betas"] = tuple(options["betas"])
    optimizer = AdamW([master], foreach=False, **options)
    optimizer.state[master] = {"step": step.clone(), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    optimizer.step()
    return [master.detach(), exp_avg, exp_avg_sq]


def is_elementwise(device: torch.device) -> bool:
    """Return True if updating parts, cut anywhere, gives the same bits as updating the full tensor."""
    # Longer than one thread's range in any kernel, with a tail that does not fill a vector.
    count = 1 << 15 | 3
    values = [_numbers(count, seed, device) for seed in (1, 2, 3)]
    values.append(_numbers(count, 4, device).abs())
    options = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": device.type == "cuda"}
    whole = _update_of(values, options)
    start, width = 0, 1
    while start < count:
        parts = _update_of([x[start : start + width] for x in values], options)
        if not all(torch.equal(part, of[start : start + width]) for part, of in zip(parts, whole, strict=True)):
            return False
        # Every length up to a few vectors, then long ones: the check takes milliseconds.
        start, width = start + width, width + 1
        if width > 40:
            width = 4099
    return True


def _update_of(values: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    step = torch.tensor(7.0)
    if options["fused"]:
        step = step.to(values[0].device)
    master, gradient, exp_avg, exp_avg_sq = (x.clone() for x in values)
    return updated(master, gradient, exp_avg, exp_avg_sq, step, **options)


def _numbers(count: int, seed: int, device: torch.device) -> Tensor:
    """Return fixed numbers in many magnitudes, equal on every machine: random integers, scaled exactly by powers of
    two.
    """
    generator = torch.Generator().manual_seed(seed)
    wholes = torch.randint(-(1 << 20), 1 << 20, (count,), generator=generator)
    powers = torch.randint(18, 26, (count,), generator=generator)
    return torch.ldexp(wholes.float(), -powers).to(device)
