"""PatchEmbedding: the residual stream's first values for images in patches.

Axes: B rows, t tokens of this rank, C channels, P patch side, N = C·P² values per patch, M model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longctx.config import ModelConfig
from longctx.kernels.dtypes import accumulate_dtype
from longctx.kernels.matmul import multiply, multiply_backward, nan_of_shape, row_tiles, sum_rows
from longctx.kernels.processor import MatmulMode
from longctx.model.layers.linear import Linear

_VALUES_AT_ONCE = 1 << 23
"""Pixel values normalized at a time."""

Normalize = Callable[[Tensor], Tensor]
"""Maps pixels, uint8 [n, N], to the projection's inputs [n, N]."""


class PatchEmbedding(Linear):
    """Linear projection of patches (ViT, arXiv 2010.11929, equation 1), and the class token if the model has one.

    The weight [M, C, P, P] is a convolution kernel, as in Hugging Face's checkpoints.
    """

    def __init__(self, config: ModelConfig) -> None:
        image, M = config.image, config.embedding_dim
        super().__init__(image.pixel_bytes, M)
        self.weight = nn.Parameter(self.weight.view(M, image.channels, image.patch, image.patch))
        self.image = image
        class_token = None
        if image.class_token:
            class_token = nn.Parameter(torch.empty(M))
        self.class_token: nn.Parameter | None
        self.register_parameter("class_token", class_token)

    def forward(self, input: Tensor, positions_Bt: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Project pixels, uint8 [B, t, N], to [B, t, M]; a document's first token becomes the class token."""
        x_BtM: Tensor = _Projection.apply(  # pyright: ignore[reportAssignmentType]
            input, self.weight.flatten(1), self.bias, self._normalize, self.matmul_mode
        )
        if self.class_token is None:
            return x_BtM
        return torch.where((positions_Bt == 0)[..., None], self.class_token, x_BtM)

    def _normalize(self, pixels_nN: Tensor) -> Tensor:
        # bfloat16 has 8 bits, as many as a pixel, so scale before rounding.
        dtype = self.weight.dtype
        values_nN = pixels_nN.to(accumulate_dtype(dtype)).div_(255)
        values_nN = values_nN.sub_(self._of_channels(self.image.mean, values_nN))
        return values_nN.div_(self._of_channels(self.image.std, values_nN)).to(dtype)

    def _of_channels(self, numbers: tuple[float, ...], like: Tensor) -> Tensor | float:
        """Return one number, or one per channel as [N] for patches by channel."""
        if len(numbers) == 1:
            return numbers[0]
        of_channels = torch.tensor(numbers, dtype=like.dtype).repeat_interleave(self.image.patch**2)
        return of_channels.to(like.device, non_blocking=True)


# Backward needs the projection's inputs for the weight's gradient. The batch holds its pixels anyway, in one byte each,
# so backward normalizes them again, and neither pass holds the inputs of all tokens at once.
class _Projection(torch.autograd.Function):
    """Normalization and projection of patches; only the weights have gradients."""

    @staticmethod
    def forward(
        ctx: Any, pixels_BtN: Tensor, weight_MN: Tensor, bias_M: Tensor, normalize: Normalize, matmul_mode: MatmulMode
    ) -> Tensor:
        ctx.save_for_backward(pixels_BtN)
        ctx.normalize, ctx.matmul_mode = normalize, matmul_mode
        pixels_nN = pixels_BtN.flatten(0, 1)
        x_nM = weight_MN.new_empty(len(pixels_nN), len(weight_MN))
        for n in _tiles(pixels_nN):
            x_nM[n] = multiply(normalize(pixels_nN[n]), weight_MN, bias_M, matmul_mode=matmul_mode)
        return x_nM.view(*pixels_BtN.shape[:2], len(weight_MN))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_BtM: Tensor):  # type: ignore[override]
        pixels_nN, dx_nM = ctx.saved_tensors[0].flatten(0, 1), dx_BtM.flatten(0, 1)
        dtype, dweight_MN = dx_nM.dtype, None
        # Only the weight's shape and dtype matter for its gradient.
        like_MN = nan_of_shape(dx_nM, (dx_nM.shape[1], pixels_nN.shape[1]))
        for n in _tiles(pixels_nN):
            values_nN = ctx.normalize(pixels_nN[n])
            _, part_MN = multiply_backward(
                dx_nM[n], values_nN, like_MN, needs_x=False, needs_weight=True, matmul_mode=ctx.matmul_mode
            )
            assert part_MN is not None
            if dweight_MN is None:
                dweight_MN = part_MN
            else:
                # A sum over many tiles needs more digits than the model's dtype.
                dweight_MN = dweight_MN.to(accumulate_dtype(dtype)).add_(part_MN)
        assert dweight_MN is not None
        return None, dweight_MN.to(dtype), sum_rows(dx_BtM), None, None


def _tiles(pixels_nN: Tensor) -> list[slice]:
    """Split tokens into tiles of at most ``_VALUES_AT_ONCE`` pixel values; one empty tile without tokens."""
    rows, values = pixels_nN.shape
    return list(row_tiles(rows, max(1, _VALUES_AT_ONCE // values))) or [slice(0)]
