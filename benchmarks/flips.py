"""Fault injection: one bit in one matmul result of a step is flipped."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.audit.capture import OPERATORS
from parallel.audit.operation_audit import CALLS
from parallel.audit.repeated_call import tensors_in

_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip_bit(x: Tensor, value: int, bit: int) -> None:
    """Flip one bit in the ``value``-th value of a tensor, in place and for any memory layout."""
    index = []
    for size in reversed(x.shape):
        value, n = divmod(value, size)
        index.append(n)
    word = x[tuple(reversed(index))].view(_WORDS[x.element_size()])
    mask = 1 << bit
    if bit == 8 * x.element_size() - 1:
        mask = -mask  # words have a sign
    word ^= mask


class Flip(TorchDispatchMode):
    """Flips a bit in the result of the ``call``-th matmul while it is armed, and counts matmuls.

    It is entered before the audit and so below it: the audit sees the values with which the step continues.
    """

    def __init__(self, operators: frozenset[str] = OPERATORS["product"]) -> None:
        super().__init__()
        self.operators = operators
        self.repeats = False
        """True if every matmul gets the same fault, including the audit's own."""
        self.is_counting = False
        """True while the step computes, as opposed to the audit."""
        self.seen = 0
        self.call, self.bit = 0, 0
        """Call 0 means no flip."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled regions compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name not in self.operators:
            return result
        self.seen += self.is_counting
        if self.repeats or (self.is_counting and self.seen == self.call):
            flipped = next(tensors_in(result))
            flip_bit(flipped, Random(self.bit).randrange(flipped.numel()), self.bit)
        return result


def looked_at(chance: Random, num_calls: int) -> list[int]:
    """Return the calls, from 1 on, that an audit with this generator keeps out of so many small ones, as ``Capture``
    draws them.
    """
    places = [0] * CALLS
    for n in range(1, num_calls + 1):
        place = n - 1
        if n > CALLS:
            place = chance.randrange(n)
        if place < CALLS:
            places[place] = n
    return [n for n in places if n]
