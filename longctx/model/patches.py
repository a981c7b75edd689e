"""PatchEmbedding: the residual stream's first values for images in patches.

Axes: B rows, t tokens of this rank, C channels, P patch side, N = C·P² values per patch, M model width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longctx.config import ModelConfig
from longctx.kernels.dtypes import accumulate_dtype
from longctx.kernels.matmul import linear
from longctx.model.layers.linear import Linear


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
        # bfloat16 has 8 bits, as many as a pixel, so scale before rounding.
        dtype = self.weight.dtype
        values_BtN = input.to(accumulate_dtype(dtype)).div_(255)
        values_BtN = values_BtN.sub_(self._of_channels(self.image.mean, values_BtN))
        values_BtN = values_BtN.div_(self._of_channels(self.image.std, values_BtN)).to(dtype)
        x_BtM = linear(values_BtN, self.weight.flatten(1), self.bias, matmul_mode=self.matmul_mode)
        if self.class_token is None:
            return x_BtM
        return torch.where((positions_Bt == 0)[..., None], self.class_token, x_BtM)

    def _of_channels(self, numbers: tuple[float, ...], like: Tensor) -> Tensor | float:
        """Return one number, or one per channel as [N] for patches by channel."""
        if len(numbers) == 1:
            return numbers[0]
        of_channels = torch.tensor(numbers, dtype=like.dtype).repeat_interleave(self.image.patch**2)
        return of_channels.to(like.device, non_blocking=True)
