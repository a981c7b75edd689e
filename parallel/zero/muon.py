"""Muon over ranks: each matrix of the momentum is made orthogonal before it is subtracted (arXiv 2502.16982).

    M ← β M + (1 − β) G        U = β M + (1 − β) G
    W ← (1 − lr·λ) W − lr · 0.2 √max(rows, columns) · orthogonal(U)

orthogonal(U) has the singular vectors of U, and singular values near 1: five steps of Newton–Schulz, a polynomial of
matrix products (K. Jordan, 2024; the coefficients of ``torch.optim.Muon``). The factor gives an update the size of
AdamW's, so that AdamW's learning rate and decay serve for both.

A rank holds ranges of flat masters, by its ZeRO stage: full matrices, parts of some, or a part of each. It makes full
matrices orthogonal by itself. Of any other matrix one rank receives all parts, and sends back to each rank its own; the
sizes alone determine that rank, so that all ranks have equal work.

Axes: n matrices, r rows, c columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longctx.model.experts.experts import is_expert_weight
from longctx.model.experts.router import Router
from longctx.model.layers.linear import Linear
from parallel.comm.communicator import Communicator
from parallel.comm.groups import ProcessGroup
from parallel.zero.optimizer import AdamW

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
_EPS = 1e-7
_RMS = 0.2
"""Root mean square of AdamW's updates, as it is found in training."""
BUCKET_VALUES = 1 << 26
"""Of matrices that travel at a time."""
_DOING = "making matrices of Muon's momentum orthogonal"


class Matrices(NamedTuple):
    """Matrices that a parameter is made of."""

    number: int
    rows: int
    columns: int

    @property
    def size(self) -> int:
        """Number of values of one matrix."""
        return self.rows * self.columns


def matrices_of(network: nn.Module) -> dict[str, Matrices]:
    """Return the matrices of each parameter that Muon updates: projections of blocks, routers, and experts one by one.

    Embeddings, heads, norms, biases, filters, and projections to one value are left to AdamW. The gate and up
    projections of experts count separately, as they are in dense layers.
    """
    found: dict[str, Matrices] = {}
    in_blocks = {
        id(module.weight)
        for name, module in network.named_modules()
        if isinstance(module, Linear | Router) and (".layers." in name or ".mtp." in name)
    }
    for name, p in network.named_parameters():
        if is_expert_weight(name) and p.ndim == 3:
            parts = 2 if name.endswith("gate_up_proj") else 1
            found[name] = Matrices(parts * p.shape[0], p.shape[1] // parts, p.shape[2])
        elif id(p) in in_blocks and min(p.shape) > 1:
            found[name] = Matrices(1, p.shape[0], p.shape[1])
    return found


def orthogonal(x_nrc: Tensor, dtype: torch.dtype) -> Tensor:
    """Return matrices with the singular vectors of these, and singular values near 1, computed in ``dtype``."""
    a, b, c = COEFFICIENTS
    out = x_nrc.to(dtype)
    is_tall = out.shape[-2] > out.shape[-1]
    if is_tall:
        out = out.mT
    # No singular value exceeds 1 then, as the polynomial requires.
    out = out / out.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(STEPS):
        gram = out @ out.mT
        out = torch.baddbmm(out, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), out, beta=a)
    if is_tall:
        out = out.mT
    return out.to(x_nrc.dtype)


class Held(NamedTuple):
    """Range of a parameter of matrices that a rank holds."""

    matrices: Matrices
    start: int
    """Its first value in the flattened parameter, as this rank held it before ZeRO."""
    numel: int
    at: int
    """Where it lies in the flat master."""


@dataclass(frozen=True)
class _Matrix:
    """Matrix that no rank holds in full."""

    number: int
    """Of its parameter, among those of the flat master."""
    first: int
    """Its first value in that parameter."""
    matrices: Matrices
    owner: int
    """The rank in the group that makes it orthogonal."""

    def part(self, start: int, numel: int) -> tuple[int, int]:
        """Return its part in a range of the parameter, counted from its own first value; (0, 0) if there is none."""
        lo, hi = max(start - self.first, 0), min(start + numel - self.first, self.matrices.size)
        return (lo, hi) if lo < hi else (0, 0)


class FlatMatrices:
    """Matrices in one flat master of each rank, and their exchange."""

    def __init__(self, held: Sequence[Held], group: ProcessGroup | None, dtype: torch.dtype) -> None:
        """Take ``held``, this rank's ranges of the same parameters on all ranks of ``group``; None: it has all."""
        self.held, self.group, self.dtype = held, group, dtype
        self._comm = Communicator()

    def make_orthogonal_(self, update_N: Tensor) -> None:
        """Replace the values of every matrix by those of the orthogonal one, times Muon's factor. Collective."""
        for held, first, last in self._whole():
            size = held.matrices.size
            begin = held.at + first * size - held.start
            part = update_N[begin : begin + (last - first) * size].view(-1, held.matrices.rows, held.matrices.columns)
            # A few at a time: there are hundreds of experts, and each step of the polynomial holds copies.
            for few in part.split(max(1, BUCKET_VALUES // size)):
                few.copy_(self._scaled(few))
        for bucket in self._buckets:
            self._exchange(update_N, bucket)

    def _scaled(self, x_nrc: Tensor) -> Tensor:
        return orthogonal(x_nrc, self.dtype) * (_RMS * max(x_nrc.shape[-2:]) ** 0.5)

    def _whole(self) -> Iterator[tuple[Held, int, int]]:
        """Yield the matrices [first, last) of each parameter that this rank holds in full."""
        for held in self.held:
            size = held.matrices.size
            first, last = -(-held.start // size), (held.start + held.numel) // size
            if first < last:
                yield held, first, last

    @cached_property
    def _ranges(self) -> list[list[tuple[int, int]]]:
        """Start and number of values of every parameter on each rank of the group. Collective."""
        own = [(held.start, held.numel) for held in self.held]
        if self.group is None:
            return [own]
        return self._comm.gather_objects(own, self.group, doing=_DOING)

    @cached_property
    def _buckets(self) -> list[list[_Matrix]]:
        """Matrices that no rank holds in full, in buckets that travel together. Collective."""
        load = [0] * len(self._ranges)
        found: list[list[_Matrix]] = []
        filled = BUCKET_VALUES
        for number, held in enumerate(self.held):
            matrices = held.matrices
            for index in range(matrices.number):
                first = index * matrices.size
                if any(start <= first and first + matrices.size <= start + n for start, n in self._of(number)):
                    continue
                # The rank with the least work so far; of several the first.
                owner = load.index(min(load))
                load[owner] += matrices.size * min(matrices.rows, matrices.columns)
                if filled + matrices.size > BUCKET_VALUES:
                    found.append([])
                    filled = 0
                found[-1].append(_Matrix(number, first, matrices, owner))
                filled += matrices.size
        return found

    def _of(self, number: int) -> list[tuple[int, int]]:
        """Return the ranges of one parameter, by rank."""
        return [of_rank[number] for of_rank in self._ranges]

    def _exchange(self, update_N: Tensor, bucket: Sequence[_Matrix]) -> None:
        """Collect each matrix of a bucket on its owner, and return the parts of the orthogonal one to their ranks."""
        assert self.group is not None, "a matrix that nobody has whole, without other ranks"
        ranks = range(self.group.size())
        own = self.group.rank()
        by_owner = [[matrix for matrix in bucket if matrix.owner == rank] for rank in ranks]
        # In the same order on both sides: by matrix of the owner, and by rank.
        mine = [[self._own_part(matrix) for matrix in of_owner] for of_owner in by_owner]
        sent = [torch.cat([update_N[part] for part in parts] or [update_N[:0]]) for parts in mine]
        theirs = [[matrix.part(*self._ranges[rank][matrix.number]) for matrix in by_owner[own]] for rank in ranks]
        counts = [len(x) for x in sent], [sum(hi - lo for lo, hi in parts) for parts in theirs]
        received = self._comm.all_to_all(torch.cat(sent), self.group, doing=_DOING, counts=counts)
        whole = [update_N.new_empty(matrix.matrices.size) for matrix in by_owner[own]]
        places = [whole[n][lo:hi] for parts in theirs for n, (lo, hi) in enumerate(parts)]
        for place, values in zip(places, received.split([len(place) for place in places]), strict=True):
            place.copy_(values)
        for x, matrix in zip(whole, by_owner[own], strict=True):
            x_rc = x.view(matrix.matrices.rows, matrix.matrices.columns)
            x_rc.copy_(self._scaled(x_rc[None])[0])
        returned = self._comm.all_to_all(
            torch.cat(places or [update_N[:0]]), self.group, doing=_DOING, counts=(counts[1], counts[0])
        )
        parts = [part for of_owner in mine for part in of_owner]
        for part, values in zip(parts, returned.split([part.stop - part.start for part in parts]), strict=True):
            update_N[part].copy_(values)

    def _own_part(self, matrix: _Matrix) -> slice:
        """Return the slice of the flat master that holds this rank's part of a matrix."""
        held = self.held[matrix.number]
        lo, hi = matrix.part(held.start, held.numel)
        begin = held.at + matrix.first - held.start
        return slice(begin + lo, begin + hi) if lo < hi else slice(0, 0)


class Muon(AdamW):
    """AdamW whose groups with ``matrices`` are updated by Muon instead; their state is one moment."""

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float, **options: Any) -> None:
        super().__init__(groups, **options)
        self.momentum = momentum
        self.matrix_dtype = torch.float32
        """What matrices are made orthogonal in: bfloat16 on GPUs, as its authors do."""
        if groups[0]["params"][0].device.type != "cpu":
            self.matrix_dtype = torch.bfloat16
        self.flats: Mapping[int, FlatMatrices] = {}
        """Of each flat master of matrices, by its identity; known once ZeRO has made them."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update by the gradients of all parameters. Collective."""
        every = self.param_groups
        self.param_groups = [group for group in every if not group["matrices"]]
        try:
            if self.param_groups:
                super().step()
        finally:
            self.param_groups = every
        for group in every:
            if group["matrices"]:
                for p in group["params"]:
                    self._update(p, group)

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        if p.grad is None:
            return
        state = self.state[p]
        if not state:
            state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p))
        state["step"] += 1
        momentum, update = state["exp_avg"], p.grad
        momentum.lerp_(update, 1 - self.momentum)
        # In place of the gradient, which is not read any more.
        update.lerp_(momentum, self.momentum)
        self.flats[id(p)].make_orthogonal_(update.view(-1))
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(update, alpha=-group["lr"])


def whole_matrices(
    masters: Mapping[str, Tensor], matrices: Mapping[str, Matrices], dtype: torch.dtype
) -> dict[int, FlatMatrices]:
    """Return ``Muon.flats`` of masters that one process holds in full, each by itself."""
    return {
        id(masters[name]): FlatMatrices([Held(of_name, 0, masters[name].numel(), 0)], None, dtype)
        for name, of_name in matrices.items()
    }
