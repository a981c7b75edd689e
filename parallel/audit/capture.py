"""``Capture``: intercepts every call of the selected operators in a step, and copies a random few.

It is a PyTorch dispatch mode below autograd, so that it also sees matmuls in backward and in recomputed layers. The
model needs no changes, and outside the context it costs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.audit.call_sample import CallSample, Kind, Place
from parallel.audit.matmul_tiles import sample_of_large
from parallel.audit.repeated_call import flat_copies, name_of, tensors_in
from parallel.audit.tensor_copies import Copied, MemoryLayout, extract_tensors
from parallel.runtime.activity import ACTIVITY

_ATEN_MATMUL = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "mv", "addmv")
_CPU_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
OPERATORS: dict[Kind, frozenset[str]] = {
    "product": frozenset({f"aten::{name}" for name in _ATEN_MATMUL} | {"longctx::multiply"}),
    # Local attention is one custom operator; in a ring the kernel calls PyTorch's. CUDA's backward kernels are
    # excluded: most add thread blocks' results in completion order, with different bits each time.
    "attention": frozenset({"longctx::attention_forward", _CPU_ATTENTION, f"{_CPU_ATTENTION}_backward"}),
}
"""Audited operators, by name without overload. An expert block counts as a matmul, whichever rank holds it."""
_ON_CPU: dict[Kind, frozenset[str]] = {
    # On CUDA a grouped matmul leaves the gradients for experts without tokens uninitialized.
    "product": frozenset({"longctx::multiply_backward", "aten::_grouped_mm"}),
    "attention": frozenset({"longctx::attention_backward"}),
}
_COPY = "aten::_to_copy"

NameOf = Callable[[int], str]
"""Returns the parameter whose memory contains an address; empty if there is none."""


def operators_of(kind: Kind, device_type: str) -> frozenset[str]:
    """Return the operators for a kind on a device type."""
    found = OPERATORS[kind]
    if device_type == "cpu":
        found |= _ON_CPU[kind]
    return found


class Capture(TorchDispatchMode):
    """Dispatch mode that copies ``count`` calls of some operators, all calls equally likely."""

    def __init__(
        self, kind: Kind, operators: frozenset[str], rng: Random, *, count: int, limit_bytes: int, name_of: NameOf
    ) -> None:
        """Sample calls with ``rng``; the copies for each use at most ``limit_bytes``."""
        super().__init__()
        # Plain functions, not bound methods: copies must be freed with this object, without a reference cycle.
        self._answer: Any = Capture._dispatch
        if "torch._dynamo" in sys.modules:
            self._answer = torch.compiler.disable(Capture._dispatch)
        self._slots: list[CallSample | None] = [None] * count
        self.seen = 0
        """Calls eligible so far."""
        self._kind: Kind = kind
        self._operators, self._rng, self._limit, self._name_of = operators, rng, limit_bytes, name_of
        self._copies: dict[int, int] = {}
        """From a converted copy's address to its source's: a weight may be multiplied in another dtype."""
        self._node, self._addresses = None, ()
        """Autograd node and operand addresses of the last call."""
        self._pending_name: tuple[Any, int] | None = None
        """Node whose next call will name a sample, and that sample's slot."""

    @property
    def samples(self) -> list[CallSample]:
        """Copied calls."""
        return [sample for sample in self._slots if sample is not None]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled regions stay compiled, so that the step computes the same as without this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: PyTorch's own exclusion imports the compiler on first use, which costs a run without
        compilation a second and 70 MiB. If the compiler is loaded, ``__init__`` excludes it.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._answer(self, func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name
        if name not in self._operators:
            result = func(*args, **kwargs)
            # A CPU without bfloat16 instructions multiplies a converted copy of the weight, which has no name.
            if name == _COPY:
                self._copies[result.data_ptr()] = args[0].data_ptr()
            return result
        return self._watch(func, args, kwargs)

    def _watch(self, func: Any, args: Any, kwargs: Any) -> Any:
        operands = list(tensors_in((args, kwargs)))
        node, addresses = torch._C._current_autograd_node(), tuple(x.data_ptr() for x in operands)
        if self._pending_name is not None and self._pending_name[0] == node:
            self._name(self._pending_name[1], addresses)
        self.seen += 1
        # Reservoir sampling (Vitter 1985, algorithm R): the n-th call takes one of k slots with probability k/n, so
        # that all calls are equally likely although their number is unknown. Of n calls about k·(1 + ln n/k) are
        # copied.
        slot = self.seen - 1
        if slot >= len(self._slots):
            slot = self._rng.randrange(self.seen)
        if slot < len(self._slots):
            result = self._take(slot, func, args, kwargs, operands, addresses, node)
        else:
            result = func(*args, **kwargs)
        self._node, self._addresses = node, addresses
        return result

    def _name(self, number: int, addresses: Sequence[int]) -> None:
        """Name the sample in this slot by the weight among these operands."""
        sample, self._pending_name = self._slots[number], None
        if sample is not None:
            self._slots[number] = replace(sample, place=sample.place._replace(weight=self._weight(addresses)))

    def _take(
        self,
        number: int,
        func: Any,
        args: Any,
        kwargs: Any,
        operands: Sequence[Tensor],
        addresses: tuple[int, ...],
        node: Any,
    ) -> Any:
        self._slots[number] = None  # release the previous sample's memory first
        weight = self._weight(addresses)
        if self._pending_name is not None and self._pending_name[1] == number:
            self._pending_name = None
        if not weight and node is not None:
            # A weight gradient is a matmul between two activations. The same node's other matmul reads the weight: it
            # came immediately before, or comes next.
            if node == self._node:
                weight = self._weight(self._addresses)
            else:
                self._pending_name = (node, number)
        place = self._place(func, operands, node, weight)
        copied = None
        # Before the call, which may write to its inputs. Use the span: a part of a larger tensor keeps the gaps between
        # its rows when rebuilt.
        if sum(MemoryLayout.of(x).span_bytes for x in operands) <= self._limit:
            copied = [Copied.of(x) for x in operands]
        result = func(*args, **kwargs)
        # The result's size is known only now; drop the copies if the call is too large.
        num_bytes = sum(x.numel() * x.element_size() for x in (*operands, *tensors_in(result)))
        if copied is None or num_bytes > self._limit:
            self._slots[number] = sample_of_large(func, args, kwargs, result, place, rng=self._rng, limit=self._limit)
            return result
        tensors: list[Tensor] = []
        slots = extract_tensors([list(args), dict(kwargs)], tensors)
        self._slots[number] = CallSample(
            op=name_of(func), args=slots[0], kwargs=slots[1], inputs=copied, outputs=flat_copies(result), place=place
        )
        return result

    def _place(self, func: Any, operands: Sequence[Tensor], node: Any, weight: str) -> Place:
        # Inside an autograd node this is backward, or a layer recomputed for it.
        phase, layer = "forward", None
        if node is not None:
            phase = "backward"
        if ACTIVITY.layer >= 0:
            layer = ACTIVITY.layer
        shapes = " and ".join(str(list(x.shape)) for x in operands[:3])
        dtype = str(operands[0].dtype).removeprefix("torch.")
        return Place(self._kind, f"{func._schema.name} of {shapes}, {dtype}", phase, layer, weight)

    def _weight(self, addresses: Sequence[int]) -> str:
        """Return the name of the parameter among these operands, directly or as the source of a converted copy."""
        for address in addresses:
            found = self._name_of(address) or self._name_of(self._copies.get(address, 0))
            if found:
                return found
        return ""
