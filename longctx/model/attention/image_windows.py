"""Attention in an image's windows: the order of its patches window by window, and the core in one process.

Tokens of a model with windows are not in reading order but in window order: window after window, in each its patches
row by row. A window is then a view of consecutive tokens. A layer with shifted windows, and the step between two
stages, need another order; a ``Mover`` provides it, in one process by an index and over ranks by a message
(``parallel/attention/context_parallel_image_windows.py``).

Axes: B rows, t tokens of this process, W windows, n tokens per window, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longctx.architecture.mixers.image_window_mixer import ImageWindowMixer
from longctx.batch import PackedDocuments
from longctx.errors import ConfigError
from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.kernels.dtypes import accumulate_dtype
from longctx.model.attention.core import AttentionCore, AttentionShapes
from longctx.model.attention.mask import AttentionMask
from longctx.model.recompute import RecomputeCache

Mover = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Brings tensors [1, t, …] into another token order, with gradient."""


@dataclass(frozen=True)
class PatchOrder:
    """Order of the patches of equal images, group after group; a group stays on one rank."""

    images: int
    rows: int
    columns: int
    kind: str
    """``reading``; ``windows`` of ``side`` patches, ``shift`` patches down and right; or ``merge``: the windows
    of the next stage, with the four patches of each of its tokens next to each other."""
    side: int = 0
    shift: int = 0

    @property
    def tokens_per_image(self) -> int:
        """Patches in one image."""
        return self.rows * self.columns

    @property
    def group(self) -> int:
        """Tokens per group."""
        if self.kind == "reading":
            return 1
        return self.side**2 * (4 if self.kind == "merge" else 1)

    def indices(self) -> np.ndarray:
        """Return the tokens in this order, int64, as indices in reading order over all images."""
        of_image = _order_in_image(self.rows, self.columns, self.kind, self.side, self.shift)
        return (np.arange(self.images)[:, None] * self.tokens_per_image + of_image).ravel()


@lru_cache(maxsize=64)
def _order_in_image(rows: int, columns: int, kind: str, side: int, shift: int) -> np.ndarray:
    """Return one image's patches in order, as indices in reading order."""
    grid = np.arange(rows * columns).reshape(rows, columns)
    if kind == "reading":
        return grid.ravel()
    if kind == "windows":
        grid = np.roll(grid, (-shift, -shift), (0, 1))
        return grid.reshape(rows // side, side, columns // side, side).swapaxes(1, 2).ravel()
    # Swin concatenates the patches (0, 0), (1, 0), (0, 1), (1, 1) of each square: column by column.
    squares = grid.reshape(rows // 2, 2, columns // 2, 2).transpose(0, 2, 3, 1).reshape(rows // 2, columns // 2, 4)
    windows = squares.reshape(rows // 2 // side, side, columns // 2 // side, side, 4)
    return windows.swapaxes(1, 2).ravel()


def window_order(mixer: ImageWindowMixer, images: int) -> PatchOrder:
    """Return the order in which a layer's windows are consecutive tokens."""
    return PatchOrder(images, mixer.rows, mixer.columns, "windows", mixer.side, mixer.shift)


# Indices and masks are the same in every layer and step, so each device gets them once. Training may read what
# generation cached, hence no inference mode.
@lru_cache(maxsize=16)
@torch.inference_mode(False)
def bias_indices(side: int, device: torch.device) -> Tensor:
    """Return the table row for each pair of patches in a window [n, n], int64, as in transformers' Swin."""
    y, x = (grid.ravel() for grid in np.divmod(np.arange(side * side), side))
    down, right = (axis[:, None] - axis[None, :] + side - 1 for axis in (y, x))
    return torch.from_numpy(down * (2 * side - 1) + right).to(device, non_blocking=True)


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def sides_of_image(mixer: ImageWindowMixer, device: torch.device) -> Tensor:
    """Return the side of the image's edge on which each patch is, window by window, uint8 [windows, n]."""
    side, shift = mixer.side, mixer.shift
    # Patches before the shift continue the last window of the row or column from the other side.
    row_sides, column_sides = (np.arange(count) < shift for count in (mixer.rows, mixer.columns))
    sides = (2 * row_sides[:, None] + column_sides[None, :]).astype(np.uint8)
    order = _order_in_image(mixer.rows, mixer.columns, "windows", side, shift)
    return torch.from_numpy(sides.ravel()[order].reshape(-1, side * side)).to(device, non_blocking=True)


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _rows_between(source: PatchOrder, target: PatchOrder, device: torch.device) -> Tensor:
    """Return the row in ``source`` for each row in ``target``, int64."""
    row_of_patch = np.empty(source.images * source.tokens_per_image, np.int64)
    row_of_patch[source.indices()] = np.arange(len(row_of_patch))
    return torch.from_numpy(row_of_patch[target.indices()]).to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class WindowPlan:
    """Work of all layers with one mixer in a forward pass."""

    mixer: ImageWindowMixer
    first_window: int
    """This process's first window among all images' windows."""
    enter: Mover | None = None
    """Brings tokens from the unshifted windows' order into this mixer's; None if they are equal."""
    leave: Mover | None = None
    """The way back."""


def attend_in_windows(q: Tensor, k: Tensor, v: Tensor, plan: WindowPlan, scale: float, bias_HR: Tensor) -> Tensor:
    """Compute attention [1, t, H, D] within windows, from the unshifted windows' order and back to it.

    ``bias_HR`` has one bias per head and relative position.
    """
    if plan.enter is None or plan.leave is None:
        return _in_windows(q, k, v, plan, scale, bias_HR)
    q, k, v = plan.enter((q, k, v))
    (out,) = plan.leave((_in_windows(q, k, v, plan, scale, bias_HR),))
    return out


def _in_windows(
    q_1tHD: Tensor, k_1tHD: Tensor, v_1tHD: Tensor, plan: WindowPlan, scale: float, bias_HR: Tensor
) -> Tensor:
    n = plan.mixer.side**2
    q, k, v = (x[0].unflatten(0, (-1, n)).transpose(1, 2) for x in (q_1tHD, k_1tHD, v_1tHD))
    scores_WHnn = torch.matmul(q, k.mT) * scale + bias_HR[:, bias_indices(plan.mixer.side, q.device)]
    if plan.mixer.shift:
        sides = sides_of_image(plan.mixer, q.device)
        numbers = torch.arange(plan.first_window, plan.first_window + len(q), device=q.device) % len(sides)
        sides_W1n = sides[numbers][:, None]
        others_W1nn = sides_W1n[..., :, None] != sides_W1n[..., None, :]
        scores_WHnn = scores_WHnn.masked_fill(others_W1nn, -torch.inf)
    # Softmax at least in float32, as in other attention.
    weights = torch.softmax(scores_WHnn, dim=-1, dtype=accumulate_dtype(scores_WHnn.dtype)).to(v.dtype)
    out_WHnD = torch.matmul(weights, v)
    return out_WHnD.transpose(1, 2).flatten(0, 1)[None]


class ImageWindowCore(AttentionCore):
    """Core for window attention. Its tokens are in the unshifted windows' order."""

    def mover(self, source: PatchOrder, target: PatchOrder, placement: Any = None) -> Mover | None:
        """Return the function from one order to another; None if both leave every token in its place.

        ``placement`` locates a batch's tokens in reading order (``Batch.placement``). Collective over ranks.
        """
        raise NotImplementedError

    def local_groups(self, order: PatchOrder) -> range:
        """Return this process's groups in an order."""
        raise NotImplementedError

    def plan(
        self, mask: AttentionMask, shapes: AttentionShapes, placement: Any = None, key_placement: Any = None
    ) -> WindowPlan:
        """Plan all layers with the mask's windows. Collective over ranks."""
        mixer = mask.image_windows
        assert mixer is not None, "the mask has no image windows"
        images = num_images(mask.documents, mixer.rows * mixer.columns)
        shifted = window_order(mixer, images)
        plain = replace(shifted, shift=0)
        first = self.local_groups(shifted).start
        return WindowPlan(mixer, first, self.mover(plain, shifted), self.mover(shifted, plain))

    def __call__(
        self,
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKV: Tensor,
        *,
        plan: WindowPlan,
        cache: Any = None,
        scores: ScoreRules | None = None,
        weights: Sequence[Tensor] = (),
        recompute_cache: RecomputeCache | None = None,
    ) -> Tensor:
        """Compute output [1, t, H, D]; recomputation forms the scores, and over ranks sends tokens, again."""
        (bias_HR,) = weights
        scale = q_BtHD.shape[-1] ** -0.5 if scores is None else scores.scale
        return attend_in_windows(q_BtHD, k_BtKD, v_BtKV, plan, scale, bias_HR)


class LocalImageWindows(ImageWindowCore):
    """Core for window attention in one process."""

    def mover(self, source: PatchOrder, target: PatchOrder, placement: Any = None) -> Mover | None:
        if source == target:
            return None
        return lambda tensors: [x.index_select(1, _rows_between(source, target, x.device)) for x in tensors]

    def local_groups(self, order: PatchOrder) -> range:
        return range(order.images * order.tokens_per_image // order.group)


def num_images(documents: PackedDocuments, tokens_per_image: int) -> int:
    """Return the number of images in a batch, padding included; raise ConfigError if it cuts one."""
    if documents.num_tokens % tokens_per_image:
        raise ConfigError(
            f"a micro-batch of {documents.num_tokens} tokens cuts an image of {tokens_per_image} tokens, whose windows "
            "need all of them.\nSet data.seq_len to a multiple, such that parallel.context divides data.seq_len × "
            "train.micro_batch_rows."
        )
    return documents.num_tokens // tokens_per_image
