"""Comparison of ranks: which of them compute equal bits, and which audit which.

Ranks compare the results of a few fixed computations, and the names of their processors and libraries. If all are
equal, a result on one rank must match another's to the last bit.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.attention import ops
from longctx.kernels.attention.kernel_interface import KernelRequest, ScoreRules
from longctx.kernels.attention.kernel_selection import choose_kernel
from longctx.kernels.attention.slices import AttentionSlice, slice_table
from parallel.audit.adamw import is_elementwise
from parallel.audit.bits import digest

_AUDITORS = 2
"""Ranks that repeat a call: three with the one that made it."""
_SHAPES = ((3, 5, 7), (64, 96, 80), (257, 130, 61), (16, 1025, 33))
"""Rows, inner dim and columns of the fixed matmuls."""


@dataclass(frozen=True)
class RankProfile:
    """A rank's properties for comparison with other ranks."""

    host: str
    machine: str
    """Processor or GPU, and libraries."""
    results: str
    """Checksum over the fixed computations."""
    repeats: bool
    """True if repeating them gave the same bits."""
    updates: bool
    """True if AdamW computes the same bits for a part of a tensor as within the full tensor."""

    @property
    def kind(self) -> tuple[str, str]:
        """Key that is equal on ranks that compute equal bits."""
        return self.machine, self.results


@dataclass(frozen=True)
class AuditAssignment:
    """Auditing ranks that repeat a rank's calls."""

    auditors: tuple[int, ...]
    exact: bool
    """True if they compute equal bits; otherwise they compare within rounding bounds."""


def profile_rank(host: str, device: torch.device, dtype: torch.dtype, kernel: str) -> RankProfile:
    """Build this rank's description."""
    # Run twice: a rank that does not reproduce its own bits has none to compare.
    first, second = (_fixed_results(device, dtype, kernel) for _ in range(2))
    return RankProfile(host, _machine(device), first, first == second, is_elementwise(device))


def assign_auditing_ranks(ranks: Sequence[RankProfile]) -> list[AuditAssignment]:
    """Assign auditing ranks to each rank, on other hosts if possible."""
    order = _interleave_hosts([x.host for x in ranks])
    assigned: list[AuditAssignment] = []
    for rank, mine in enumerate(ranks):
        others = _after(order, rank)
        # The nearest ones, to share the work: each rank audits two others.
        same_kind = [other for other in others if ranks[other].kind == mine.kind]
        if same_kind or not others:
            assigned.append(AuditAssignment(tuple(same_kind[:_AUDITORS]), exact=True))
        else:
            assigned.append(AuditAssignment(tuple(others[:_AUDITORS]), exact=False))
    return assigned


def _interleave_hosts(hosts: Sequence[str]) -> list[int]:
    """Order the ranks by taking hosts in turn, so that neighbours are on different hosts as far as possible."""
    of_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        of_host.setdefault(host, []).append(rank)
    longest = max(map(len, of_host.values()))
    return [ranks[n] for n in range(longest) for ranks in of_host.values() if n < len(ranks)]


def _after(order: Sequence[int], rank: int) -> list[int]:
    """Return all other ranks in cyclic order, starting with the next one."""
    place = order.index(rank)
    return list(order[place + 1 :]) + list(order[:place])


def _machine(device: torch.device) -> str:
    """Return the properties that determine which instructions a library uses."""
    # Include the thread count: threads partition sums.
    parts = [torch.__version__, str(torch.get_num_threads()), platform.machine()]
    if device.type == "cuda":
        parts += [torch.cuda.get_device_name(device), str(torch.version.cuda)]
    else:
        parts += [_processor(), torch.backends.cpu.get_cpu_capability()]
    return ", ".join(parts)


@cache
def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor()


def _fixed_results(device: torch.device, dtype: torch.dtype, kernel: str) -> str:
    """Compute a checksum over fixed matmuls and attention."""
    found: list[Tensor] = []
    for n, k, m in _SHAPES:
        for of in dict.fromkeys((dtype, torch.float32)):
            a, b = _numbers((n, k), 1, of, device), _numbers((m, k), 2, of, device)
            found += [(a @ b.T).flatten(), (b @ a.T).flatten()]
    return digest(found + _attention(device, dtype, kernel))


def _attention(device: torch.device, dtype: torch.dtype, kernel: str) -> list[Tensor]:
    """Return a kernel's results for a short sequence; empty if it does not support head size 64."""
    t, H, K, D = 96, 4, 2, 64
    try:
        name = choose_kernel(kernel, KernelRequest(device.type, dtype, D, H, K)).name
    except ConfigError:
        return []
    q, k, v = (_numbers((1, t, heads, D), heads, dtype, device) for heads in (H, K, K))
    slices = slice_table((AttentionSlice(0, t, 0, t, lo=0),))
    out, lse = ops.forward(name, q, k, v, slices, scores=ScoreRules(scale=D**-0.5))
    return [out.flatten(), lse.flatten()]


def _numbers(shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return fixed numbers that are equal on every machine: integers divided by a power of two."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-127, 128, shape, generator=generator).float() / 64).to(dtype).to(device)
