"""Attention by definition, and what the tests of attention across ranks feed it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from longctx.kernels.attention.kernel_interface import RelativeBias, ScoreRules
from longctx.kernels.processor import MatmulMode
from parallel.attention.context_parallel_softmax import context_parallel_attention
from parallel.layout.sequence import SequenceLayout
from parallel.mesh import Mesh
from parallel.schedule.attention_schedule import Schedule
from tests.parallel.schedule.test_attention_schedule import full_mask

DOCUMENTS = {
    "one": lambda T: [0, T],
    "packed": lambda T: [0, 1, 5, 5, T // 3, T // 3 + 1, T - 7, T],
    "short": lambda T: [*range(0, T, 3), T],
}

MASKS = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"window": 7},
    "sinks": {"window": 5, "sink_tokens": 2},
    "near": {"causal": False, "window": 6, "sink_tokens": 3},
    "sparse": {"window": 4, "stride": 3},
    "sparse, both sides": {"causal": False, "window": 3, "stride": 4},
}


@dataclass(frozen=True)
class Case:
    """One call of attention: sizes, mask, rules of the scores, and how it is spread."""

    tokens: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 8
    layout: str = "zigzag"
    documents: str = "packed"
    mask: str = "causal"
    ulysses: int = 1
    transport: str = "p2p"
    ranks_per_node: int = 1
    kernel: str = "reference"
    matmul_mode: MatmulMode = "native"
    dtype: torch.dtype = torch.float64
    scores: dict = field(default_factory=dict)
    """softcap, alibi, relative: what the scores have besides the dot product."""
    sinks: bool = False
    communication_dtype: torch.dtype | None = None
    batch: int = 1

    def inputs(self) -> list[Tensor]:
        """q, k, v and the output's gradient, the same on every rank."""
        g = torch.Generator().manual_seed(0)
        sizes = (
            (self.heads, self.head_dim),
            (self.kv_heads, self.head_dim),
            (self.kv_heads, self.value_dim),
            (self.heads, self.value_dim),
        )
        made = [torch.randn(self.batch, self.tokens, *s, generator=g, dtype=torch.float64) for s in sizes]
        return [x.to(self.dtype) for x in made]

    def learned(self) -> dict[str, Tensor]:
        """The bias table and the sinks, as far as the case has them."""
        g = torch.Generator().manual_seed(1)
        found = {}
        if "relative" in self.scores:
            found["table"] = torch.randn(8, self.heads, generator=g, dtype=torch.float64).to(self.dtype)
        if self.sinks:
            found["sinks"] = torch.randn(self.heads, generator=g, dtype=torch.float64).to(self.dtype)
        return found

    def build_scores(self, table: Tensor | None) -> ScoreRules:
        slopes = 0.5 ** torch.arange(1, self.heads + 1, dtype=torch.float32) if "alibi" in self.scores else None
        bias = None if table is None else RelativeBias(table, max_distance=16, bidirectional=not self.causal)
        scale = self.head_dim**-0.5
        return ScoreRules(scale=scale, softcap=self.scores.get("softcap"), alibi_slopes_H=slopes, relative_bias=bias)

    @property
    def causal(self) -> bool:
        return MASKS[self.mask].get("causal", True)

    @property
    def cu_seqlens(self) -> list[int]:
        return DOCUMENTS[self.documents](self.tokens)


SPREAD = {"layout", "ulysses", "transport", "ranks_per_node", "kernel", "matmul_mode", "communication_dtype"}
"""What of a case does not change its result."""
_found: dict[tuple[str, ...], dict[str, Tensor]] = {}


def by_definition(case: Case) -> dict[str, Tensor]:
    """``_by_definition``, computed once for all ways of spreading a case. Not to be written to."""
    asked = tuple(repr(getattr(case, f.name)) for f in fields(case) if f.name not in SPREAD)
    if asked not in _found:
        _found[asked] = _by_definition(case)
    return _found[asked]


def _by_definition(case: Case) -> dict[str, Tensor]:
    """Output and every gradient of one process, scores whole, in float64 by autograd."""
    q, k, v, dout = (x.double() for x in case.inputs())
    leaves = {"q": q, "k": k, "v": v} | {n: x.double() for n, x in case.learned().items()}
    leaves = {n: x.requires_grad_() for n, x in leaves.items()}
    out = softmax_attention(case, leaves)
    grads = torch.autograd.grad(out, list(leaves.values()), dout, allow_unused=True)
    return {"out": out.detach()} | {f"d{n}": g for n, g in zip(leaves, grads, strict=True)}


def softmax_attention(case: Case, leaves: dict[str, Tensor]) -> Tensor:
    """softmax over the keys a query sees, and over its sink where there is one."""
    group = case.heads // case.kv_heads
    k, v = (leaves[n].repeat_interleave(group, 2) for n in ("k", "v"))
    values = torch.einsum("bihd,bjhd->bhij", leaves["q"], k) * case.head_dim**-0.5
    if cap := case.scores.get("softcap"):
        values = cap * torch.tanh(values / cap)
    distance = torch.arange(case.tokens)[:, None] - torch.arange(case.tokens)
    if "alibi" in case.scores:
        slopes = 0.5 ** torch.arange(1, case.heads + 1, dtype=torch.float64)
        values = values - slopes[:, None, None] * distance.abs()
    if "table" in leaves:
        buckets = t5_buckets(distance, 8, 16, bidirectional=not case.causal)
        values = values + leaves["table"][buckets].permute(2, 0, 1)
    mask = full_mask(case.cu_seqlens, **MASKS[case.mask])
    values = values.masked_fill(~mask, -torch.inf)
    if "sinks" in leaves:
        sinks = leaves["sinks"][None, :, None, None].expand(case.batch, -1, case.tokens, 1)
        weights = torch.cat([values, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = values.softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def t5_buckets(distance: Tensor, num_buckets: int, max_distance: int, *, bidirectional: bool) -> Tensor:
    """T5's buckets of query place minus key place, one number at a time."""
    found = torch.empty_like(distance)
    for index, d in enumerate(distance.flatten().tolist()):
        bucket, n = 0, num_buckets
        if bidirectional:
            n //= 2
            bucket = n if d < 0 else 0
        d = abs(d) if bidirectional else max(d, 0)
        half = n // 2
        if d < half:
            bucket += d
        else:
            wide = torch.tensor(d / half).log() / torch.tensor(max_distance / half).log() * (n - half)
            bucket += min(half + int(wide), n - 1)
        found.view(-1)[index] = bucket
    return found


def spread(case: Case, mesh: Mesh) -> tuple[SequenceLayout, dict[str, Tensor]]:
    """The layout, and this rank's output and gradients by ``context_parallel_attention``."""
    layout = SequenceLayout.build(case.layout, case.tokens, mesh.context, case.cu_seqlens, case.ulysses)
    schedule = Schedule.build(layout, case.cu_seqlens, **MASKS[case.mask])
    q, k, v, dout = (layout.split(x, mesh.context_rank, 1) for x in case.inputs())
    leaves = {"q": q, "k": k, "v": v} | case.learned()
    leaves = {n: x.clone().requires_grad_() for n, x in leaves.items()}
    out = context_parallel_attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        schedule=schedule,
        mesh=mesh,
        kernel=case.kernel,
        matmul_mode=case.matmul_mode,
        scores=case.build_scores(leaves.get("table")),
        sinks_H=leaves.get("sinks"),
        transport=case.transport,
        communication_dtype=case.communication_dtype,
    )
    assert out.dtype == case.dtype
    out.backward(dout)
    return layout, {"out": out.detach()} | {f"d{n}": x.grad for n, x in leaves.items()}


def check_case(case: Case, mesh: Mesh, bound: float) -> None:
    """Each of this rank's results within ``bound`` (relative, Frobenius) of the definition."""
    layout, got = spread(case, mesh)
    for name, want in by_definition(case).items():
        found, size = got[name].double(), want.norm() / mesh.context**0.5  # a share's may be 0
        if name in ("dtable", "dsinks"):  # of this rank's queries alone, as any weight's gradient
            torch.distributed.all_reduce(found) if mesh.world_size > 1 else None
        else:
            want = layout.split(want, mesh.context_rank, 1)
        error = ((found - want).norm() / size).item()
        assert error <= bound, f"{name} on rank {mesh.rank}: relative error {error:.2e} > {bound:.0e} in {case}"


def errors_of(case: Case, mesh: Mesh) -> dict[str, float]:
    """How far output and gradients are off in all, over the ranks that share the case: relative, Frobenius."""
    layout, got = spread(case, mesh)
    errors = {}
    for name, want in by_definition(case).items():
        squares = (got[name].double() - layout.split(want, mesh.context_rank, 1)).square().sum()
        if mesh.context > 1:
            torch.distributed.all_reduce(squares, group=mesh.context_group)
        errors[name] = float(squares.sqrt() / want.norm())
    return errors
