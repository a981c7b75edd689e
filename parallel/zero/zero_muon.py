"""Muon over ranks: each momentum matrix is orthogonalized before it is subtracted (arXiv 2502.16982).

    M ← β M + (1 − β) G        U = β M + (1 − β) G
    W ← (1 − lr·λ) W − lr · 0.2 √max(rows, columns) · orthogonal(U)

orthogonal(U) has U's singular vectors, and singular values near 1: five Newton–Schulz steps, a polynomial in matmuls
(K. Jordan, 2024; coefficients from ``torch.optim.Muon``). The factor scales the update to AdamW's size, so that AdamW's
learning rate and decay apply to both.

Depending on the ZeRO stage, a rank's flat masters contain full matrices, parts of some, or a part of each. A rank
orthogonalizes full matrices locally. For any other matrix, one rank receives all parts and sends each rank its own part
back; that rank follows from the sizes alone, so that all ranks have equal work.

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
from parallel.comm.process_groups import ProcessGroup
from parallel.zero.optimizer import AdamW

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
_EPS = 1e-7
_RMS = 0.2
"""Root mean square of AdamW's updates, as measured in training."""
BUCKET_VALUES = 1 << 26
"""Matrix values exchanged at a time."""
_OPERATION = "orthogonalizing Muon's momentum matrices"


class Matrices(NamedTuple):
    """Matrices that make up a parameter."""

    number: int
    rows: int
    columns: int

    @property
    def size(self) -> int:
        """Values per matrix."""
        return self.rows * self.columns


def matrices_of(network: nn.Module) -> dict[str, Matrices]:
    """Return the matrices that Muon updates, by parameter: block projections, routers, and experts one by one.

    AdamW updates embeddings, heads, norms, biases, filters, and projections to one value. An expert's gate and up
    projections count separately, as in dense layers.
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
    """Return matrices with the same singular vectors and singular values near 1, computed in ``dtype``."""
    a, b, c = COEFFICIENTS
    out = x_nrc.to(dtype)
    is_tall = out.shape[-2] > out.shape[-1]
    if is_tall:
        out = out.mT
    # Normalize so that no singular value exceeds 1, as the polynomial requires.
    out = out / out.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    # Newton–Schulz: X ← aX + (bA + cA²)X with A = X·Xᵀ. On the wide orientation, A is the smaller Gram matrix.
    for _ in range(STEPS):
        gram = out @ out.mT
        out = torch.baddbmm(out, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), out, beta=a)
    if is_tall:
        out = out.mT
    return out.to(x_nrc.dtype)


class MatrixRange(NamedTuple):
    """Range of a matrix parameter that a rank holds."""

    matrices: Matrices
    start: int
    """First value in the flattened parameter, as this rank held it before ZeRO."""
    numel: int
    at: int
    """Offset in the flat master."""


@dataclass(frozen=True)
class _Matrix:
    """Matrix that no rank holds in full."""

    number: int
    """Index of its parameter in the flat master."""
    first: int
    """Offset of its first value in that parameter."""
    matrices: Matrices
    owner: int
    """Group rank that orthogonalizes it."""

    def part(self, start: int, numel: int) -> tuple[int, int]:
        """Return the overlap with a range of the parameter, as offsets in the matrix; (0, 0) if they are disjoint."""
        lo, hi = max(start - self.first, 0), min(start + numel - self.first, self.matrices.size)
        return (lo, hi) if lo < hi else (0, 0)


class FlatMatrices:
    """Matrices in one flat master per rank, and their exchange."""

    def __init__(self, held: Sequence[MatrixRange], group: ProcessGroup | None, dtype: torch.dtype) -> None:
        """Store ``held``, this rank's ranges; ``group`` holds the other parts (None: this rank has all)."""
        self.held, self.group, self.dtype = held, group, dtype
        self._comm = Communicator()

    def make_orthogonal_(self, update_N: Tensor) -> None:
        """Replace every matrix by its orthogonalized form times Muon's factor. Collective."""
        for held, first, last in self._whole():
            size = held.matrices.size
            begin = held.at + first * size - held.start
            part = update_N[begin : begin + (last - first) * size].view(-1, held.matrices.rows, held.matrices.columns)
            # A few at a time: there are hundreds of experts, and each Newton–Schulz step allocates copies.
            for few in part.split(max(1, BUCKET_VALUES // size)):
                few.copy_(self._scaled(few))
        for bucket in self._buckets:
            self._exchange(update_N, bucket)

    def _scaled(self, x_nrc: Tensor) -> Tensor:
        return orthogonal(x_nrc, self.dtype) * (_RMS * max(x_nrc.shape[-2:]) ** 0.5)

    def _whole(self) -> Iterator[tuple[MatrixRange, int, int]]:
        """Yield each parameter's matrices [first, last) that this rank holds in full."""
        for held in self.held:
            size = held.matrices.size
            first, last = -(-held.start // size), (held.start + held.numel) // size
            if first < last:
                yield held, first, last

    @cached_property
    def _ranges(self) -> list[list[tuple[int, int]]]:
        """Start and size of every parameter's range on each rank in the group. Collective."""
        own = [(held.start, held.numel) for held in self.held]
        if self.group is None:
            return [own]
        return self._comm.gather_objects(own, self.group, operation=_OPERATION)

    @cached_property
    def _buckets(self) -> list[list[_Matrix]]:
        """Matrices that no rank holds in full, in buckets that are exchanged together. Collective."""
        load = [0] * len(self._ranges)
        found: list[list[_Matrix]] = []
        filled = BUCKET_VALUES
        for number, held in enumerate(self.held):
            matrices = held.matrices
            for index in range(matrices.number):
                first = index * matrices.size
                if any(start <= first and first + matrices.size <= start + n for start, n in self._of(number)):
                    continue
                # Greedy balance: the rank with the least work so far, the first one in a tie. Deterministic, so all
                # ranks agree.
                owner = load.index(min(load))
                load[owner] += matrices.size * min(matrices.rows, matrices.columns)
                if filled + matrices.size > BUCKET_VALUES:
                    found.append([])
                    filled = 0
                found[-1].append(_Matrix(number, first, matrices, owner))
                filled += matrices.size
        return found

    def _of(self, number: int) -> list[tuple[int, int]]:
        return [of_rank[number] for of_rank in self._ranges]

    def _exchange(self, update_N: Tensor, bucket: Sequence[_Matrix]) -> None:
        """Collect each bucket matrix on its owner, and return the orthogonalized parts to their ranks."""
        assert self.group is not None, "a sharded matrix without a process group"
        ranks = range(self.group.size())
        own = self.group.rank()
        by_owner = [[matrix for matrix in bucket if matrix.owner == rank] for rank in ranks]
        # Both sides use the same order: by the owner's matrix, then by rank.
        mine = [[self._own_part(matrix) for matrix in of_owner] for of_owner in by_owner]
        sent = [torch.cat([update_N[part] for part in parts] or [update_N[:0]]) for parts in mine]
        remote_parts = [[matrix.part(*self._ranges[rank][matrix.number]) for matrix in by_owner[own]] for rank in ranks]
        counts = [len(x) for x in sent], [sum(hi - lo for lo, hi in parts) for parts in remote_parts]
        received = self._comm.all_to_all(torch.cat(sent), self.group, operation=_OPERATION, counts=counts)
        whole = [update_N.new_empty(matrix.matrices.size) for matrix in by_owner[own]]
        part_views = [whole[n][lo:hi] for parts in remote_parts for n, (lo, hi) in enumerate(parts)]
        for place, values in zip(part_views, received.split([len(place) for place in part_views]), strict=True):
            place.copy_(values)
        for x, matrix in zip(whole, by_owner[own], strict=True):
            x_rc = x.view(matrix.matrices.rows, matrix.matrices.columns)
            x_rc.copy_(self._scaled(x_rc[None])[0])
        returned = self._comm.all_to_all(
            torch.cat(part_views or [update_N[:0]]), self.group, operation=_OPERATION, counts=(counts[1], counts[0])
        )
        parts = [part for of_owner in mine for part in of_owner]
        for part, values in zip(parts, returned.split([part.stop - part.start for part in parts]), strict=True):
            update_N[part].copy_(values)

    def _own_part(self, matrix: _Matrix) -> slice:
        """Return this rank's part of a matrix as a slice of the flat master."""
        held = self.held[matrix.number]
        lo, hi = matrix.part(held.start, held.numel)
        begin = held.at + matrix.first - held.start
        return slice(begin + lo, begin + hi) if lo < hi else slice(0, 0)


class Muon(AdamW):
    """AdamW that updates groups with ``matrices`` by Muon instead; these keep one moment."""

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float, **options: Any) -> None:
        super().__init__(groups, **options)
        self.momentum = momentum
        self.matrix_dtype = torch.float32
        """Dtype for orthogonalization: bfloat16 on GPUs, as in the reference implementation."""
        if groups[0]["params"][0].device.type != "cpu":
            self.matrix_dtype = torch.bfloat16
        self.flat_buffers: Mapping[int, FlatMatrices] = {}
        """By identity of each flat matrix master; set once ZeRO has created them."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update with the gradients of all parameters. Collective."""
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
        # In place of the gradient, which is not read again.
        update.lerp_(momentum, self.momentum)
        self.flat_buffers[id(p)].make_orthogonal_(update.view(-1))
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(update, alpha=-group["lr"])


def whole_matrices(
    masters: Mapping[str, Tensor], matrices: Mapping[str, Matrices], dtype: torch.dtype
) -> dict[int, FlatMatrices]:
    """Build ``Muon.flat_buffers`` for masters that one process holds in full, each separately."""
    return {
        id(masters[name]): FlatMatrices([MatrixRange(of_name, 0, masters[name].numel(), 0)], None, dtype)
        for name, of_name in matrices.items()
    }
