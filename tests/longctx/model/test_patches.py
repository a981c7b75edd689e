"""The patch projection against a plain one: values and gradients, in tiles of any size."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from longctx.model import patches
from longctx.model.patches import PatchEmbedding
from tests.longctx.image_samples import PATCHES, vit_config

COUNT, N = 33, PATCHES.pixel_bytes


def embedding(dtype: torch.dtype, *, class_token: bool = False) -> PatchEmbedding:
    image = replace(PATCHES, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25), class_token=class_token)
    changed = {} if class_token else {"class_pool": "mean", "max_positions": 15}
    module = PatchEmbedding(vit_config(image, **changed))
    generator = torch.Generator().manual_seed(0)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.1, generator=generator)
    return module.to(dtype)


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(256, (1, COUNT, N), generator=generator, dtype=torch.uint8)
    return pixels, torch.arange(COUNT)[None] % 16


def plain(module: PatchEmbedding, pixels: Tensor) -> Tensor:
    """A convolution's product, by autograd."""
    image = module.image
    mean, std = (torch.tensor(x, dtype=torch.float64).repeat_interleave(4) for x in (image.mean, image.std))
    values = ((pixels.double() / 255 - mean) / std).to(module.weight.dtype)
    return functional.linear(values, module.weight.flatten(1), module.bias)


@pytest.mark.parametrize("values_at_once", [1, 5 * N, 1 << 23])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_gradients_are_those_of_a_plain_projection(values_at_once, dtype, error):
    module, (pixels, positions) = embedding(dtype), inputs()
    upstream = torch.randn(1, COUNT, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    found = []
    with mock.patch.object(patches, "_VALUES_AT_ONCE", values_at_once):
        for out in (module(pixels, positions), plain(module, pixels)):
            assert out.dtype == dtype
            found.append([out.detach(), *torch.autograd.grad((out * upstream).sum(), [module.weight, module.bias])])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= error * theirs.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_products_round_once(dtype):
    module, (pixels, positions) = embedding(dtype), inputs()
    module.matmul_mode = "float32"
    out = module(pixels, positions)
    out.float().square().sum().backward()
    exact = embedding(dtype).double()
    wanted = plain(exact, pixels)
    torch.testing.assert_close(out.double(), wanted, rtol=2**-7, atol=0.02)
    assert module.weight.grad is not None


def test_nothing_is_kept_but_the_pixels():
    module, (pixels, positions) = embedding(torch.float32), inputs()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        module(pixels, positions)
    assert [x.data_ptr() for x in kept] == [pixels.data_ptr()]


def test_a_rank_without_tokens_has_zero_gradients():
    module = embedding(torch.float32)
    module(torch.zeros(1, 0, N, dtype=torch.uint8), torch.zeros(1, 0, dtype=torch.int64)).sum().backward()
    for p in (module.weight, module.bias):
        assert p.grad is not None
        assert not p.grad.any()


def test_the_class_token_replaces_first_tokens():
    module, (pixels, positions) = embedding(torch.float32, class_token=True), inputs()
    out = module(pixels, positions)
    assert module.class_token is not None
    assert (out[0, [0, 16, 32]] == module.class_token).all()
    torch.testing.assert_close(out[0, 1:16], plain(module, pixels)[0, 1:16], rtol=1e-5, atol=1e-6)
