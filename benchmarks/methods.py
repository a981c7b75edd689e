"""One attention problem, the methods to solve it over ranks, and their measurement: time, memory and error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.blocks import blocks_alone
from benchmarks.ranks import alternate, run_ranks, with_resident_rise
from longctx.model.attention.core import AttentionShapes
from parallel.attention.context_parallel_plan import ContextParallelOptions, ContextParallelPlan
from parallel.attention.context_parallel_softmax import planned_attention
from parallel.layout.sequence import SequenceLayout
from parallel.mesh import Mesh
from parallel.schedule.attention_schedule import Schedule

HEADS, HEAD_DIM = 8, 64
NAMES = ("out", "dq", "dk", "dv")

Solve = Callable[[list[Tensor]], list[Tensor]]
"""Maps this rank's q, k, v and the output's gradient to its output, dq, dk, dv; [1, t, heads, D] each."""


@dataclass(frozen=True)
class Problem:
    """Attention, forward and backward, with inputs that are the same in every process."""

    name: str
    dtype: torch.dtype
    num_kv_heads: int
    cu_seqlens: tuple[int, ...]
    causal: bool = True

    @property
    def tokens(self) -> int:
        """Row length."""
        return self.cu_seqlens[-1]

    def inputs(self) -> list[Tensor]:
        """Return q, k, v and the output's gradient, for the full row."""
        g = torch.Generator().manual_seed(0)
        heads = (HEADS, self.num_kv_heads, self.num_kv_heads, HEADS)
        return [torch.randn(1, self.tokens, h, HEAD_DIM, generator=g).to(self.dtype) for h in heads]


FP32, BF16 = "fp32, 8 query and 8 key heads", "bf16, 8 query and 2 key heads"


def problem(name: str, *cu_seqlens: int) -> Problem:
    """Return an FP32 or BF16 problem over documents that end at ``cu_seqlens``."""
    return Problem(name, torch.float32 if name == FP32 else torch.bfloat16, 8 if name == FP32 else 2, cu_seqlens)


@dataclass(frozen=True)
class Method:
    """A method to solve a problem over ranks."""

    name: str
    prepare: Callable[..., tuple[SequenceLayout, Solve]]
    """``prepare(problem, degree, *arguments)`` on every rank: returns the inputs' layout and the solver."""
    arguments: tuple[Any, ...] = ()
    layout: str | None = None
    """Layout whose KV blocks give the floor (``benchmarks/blocks.py``); None if that is not measured."""


def prepare_ours(
    asked: Problem, degree: int, kind: str, transport: str, ulysses: int = 1
) -> tuple[SequenceLayout, Solve]:
    """Return ``attend`` with a layout and a transport, heads split over ``ulysses`` of the ranks.

    It is planned here, as a model plans it once for all layers of a batch.
    """
    layout = SequenceLayout.build(kind, asked.tokens, degree, asked.cu_seqlens, ulysses, causal=asked.causal)
    schedule = Schedule.build(layout, asked.cu_seqlens, asked.causal)
    mesh = Mesh.build(context=degree, ulysses=ulysses)
    shapes = AttentionShapes(
        batch=1,
        tokens=layout.num_local(mesh.context_rank),
        num_heads=HEADS,
        num_kv_heads=asked.num_kv_heads,
        head_dim=HEAD_DIM,
        value_dim=HEAD_DIM,
        dtype=asked.dtype,
        device_type="cpu",
        scale=HEAD_DIM**-0.5,
    )
    plan = ContextParallelPlan.build(schedule, mesh, shapes, ContextParallelOptions(transport=transport))

    def solve(mine: list[Tensor]) -> list[Tensor]:
        q, k, v = (x.detach().requires_grad_() for x in mine[:3])
        out = planned_attention(q, k, v, plan)
        out.backward(mine[3])
        return [out.detach(), *(x.grad for x in (q, k, v))]  # type: ignore[list-item]

    return layout, solve


def ring_method(layout: str) -> Method:
    """Return our ring with a layout, compared with its KV blocks alone too."""
    return Method(f"longctx ring, {layout}", prepare_ours, (layout, "p2p"), layout)


RING = ring_method("zigzag")


def one_process(asked: Problem, full: list[Tensor]) -> list[Tensor]:
    """Return output and gradients by PyTorch's own attention, document by document."""
    parts = [_one_document([x[:, a:b] for x in full], asked.causal) for a, b in pairwise(asked.cu_seqlens) if b > a]
    return [torch.cat(of, 1) for of in zip(*parts, strict=True)]


def _one_document(tensors: list[Tensor], causal: bool) -> list[Tensor]:
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in tensors[:3])
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    out.backward(tensors[3].transpose(1, 2))
    return [x.detach().transpose(1, 2) for x in (out, q.grad, k.grad, v.grad)]  # type: ignore[union-attr]


@dataclass(frozen=True)
class Solved:
    """One rank's results for one method."""

    results: list[Tensor]
    rise_mib: float
    """Peak resident memory in the process's first use of the method, over that before it."""
    layout: SequenceLayout


def solve_once(asked: Problem, method: Method, degree: int) -> Solved:
    """Return results and memory; to be called in a fresh process."""
    layout, solve = method.prepare(asked, degree, *method.arguments)
    rank = torch.distributed.get_rank()
    mine = [layout.split(x, rank, 1) for x in asked.inputs()]
    results, rise = with_resident_rise(lambda: solve(mine))
    return Solved(results, rise, layout)


@dataclass(frozen=True)
class Timed:
    """One rank's CPU seconds."""

    one_process: float
    methods: list[float]
    blocks: dict[str, float]
    """KV blocks alone, by layout."""


def time_rounds(asked: Problem, methods: tuple[Method, ...], degree: int, rounds: int) -> Timed:
    """Time the single process's work, each method and its KV blocks alone; all in the same process, by turns.

    Cores of a shared machine are not equally fast, so each rank is compared with its own time for the same work. While
    one process does all the work the others do the same: cores with common caches are slower together than alone.
    """
    full, rank = asked.inputs(), torch.distributed.get_rank()
    actions: list[Callable[[], Any]] = [lambda: one_process(asked, full)]
    for method in methods:
        layout, solve = method.prepare(asked, degree, *method.arguments)
        mine = [layout.split(x, rank, 1) for x in full]
        actions.append(lambda solve=solve, mine=mine: solve(mine))
    kinds = [method.layout for method in methods if method.layout is not None]
    for kind in kinds:
        layout = SequenceLayout.build(kind, asked.tokens, degree, asked.cu_seqlens, causal=asked.causal)
        actions.append(blocks_alone(Schedule.build(layout, asked.cu_seqlens, asked.causal), rank, full))
    for action in actions:
        action()  # the first use of anything is not counted
    seconds = alternate(actions, rounds)
    stop = 1 + len(methods)
    return Timed(seconds[0], seconds[1:stop], dict(zip(kinds, seconds[stop:], strict=True)))


def measure_time(asked: Problem, methods: Sequence[Method], degree: int, rounds: int) -> list[dict[str, Any]]:
    """Return each method's CPU seconds by rank, and the worst rank's ratio to its part of the single process's work."""
    ranks = run_ranks(time_rounds, degree, asked, tuple(methods), degree, rounds)
    return [_timed_row(asked, method, n, ranks) for n, method in enumerate(methods)]


def _timed_row(asked: Problem, method: Method, n: int, ranks: list[Timed]) -> dict[str, Any]:
    shares = [timed.one_process / len(ranks) for timed in ranks]
    seconds = [timed.methods[n] for timed in ranks]
    row = {
        "case": asked.name,
        "method": method.name,
        "cpu_seconds_per_rank": [round(s, 3) for s in seconds],
        "one_process_cpu_seconds": [round(timed.one_process, 3) for timed in ranks],
        "ratio_to_share_per_rank": [round(s / share, 3) for s, share in zip(seconds, shares, strict=True)],
        "ratio_to_share": round(max(s / share for s, share in zip(seconds, shares, strict=True)), 3),
    }
    if method.layout is not None:
        blocks = [timed.blocks[method.layout] for timed in ranks]
        row["blocks_cpu_seconds_per_rank"] = [round(s, 3) for s in blocks]
        row["ratio_to_blocks"] = round(max(s / floor for s, floor in zip(seconds, blocks, strict=True)), 3)
        row["blocks_ratio_to_share"] = round(max(s / share for s, share in zip(blocks, shares, strict=True)), 3)
    return row


def measure_once(asked: Problem, method: Method, degree: int) -> dict[str, Any]:
    """Return errors against float64, and the largest increase in a rank's resident memory, from processes with one
    method each.
    """
    ranks = run_ranks(solve_once, degree, asked, method, degree)
    joined = [ranks[0].layout.join(parts, 1) for parts in zip(*(r.results for r in ranks), strict=True)]
    return {
        "case": asked.name,
        "method": method.name,
        "degree": degree,
        "relative_error": errors(asked, joined),
        "one_process_relative_error": one_process_errors(asked),
        "resident_rise_mib": round(max(r.rise_mib for r in ranks)),
    }


def errors(asked: Problem, got: list[Tensor]) -> dict[str, float]:
    """Return each result's relative (Frobenius) error against one process in float64."""
    pairs = zip(NAMES, got, exact(asked), strict=True)
    return {n: float(f"{float((a.double() - b).norm() / b.norm()):.3g}") for n, a, b in pairs}


@lru_cache(maxsize=2)
def exact(asked: Problem) -> list[Tensor]:
    """Return the results in float64."""
    return one_process(asked, [x.double() for x in asked.inputs()])


@lru_cache(maxsize=8)
def one_process_errors(asked: Problem) -> dict[str, float]:
    """Return the errors of one process's ``scaled_dot_product_attention``, document by document."""
    return errors(asked, one_process(asked, asked.inputs()))
