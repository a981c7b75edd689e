"""Our calls of flash-attn 4, compiled by its own code for one architecture, on fake tensors. Takes sm_90 or sm_100."""

from __future__ import annotations

import sys

import torch
from torch._subclasses import FakeTensorMode

from longctx.kernels.attention.flash.adapter import FlashKernel
from longctx.kernels.attention.flash.calls import slices_to_calls
from longctx.kernels.attention.flash.libraries import FLASH4
from longctx.kernels.attention.kernel_interface import KernelRequest, ScoreRules
from longctx.kernels.attention.slices import AttentionSlice, slice_table
from tests.fake_cuda import say

CASES = {
    "causal documents": ((8, 2, 128, 128), ScoreRules(scale=0.1), [(0, 200), (200, 201), (201, 512)], None),
    "window and soft cap": ((8, 8, 64, 64), ScoreRules(scale=0.1, softcap=20.0), [(0, 512)], 100),
    "latent heads": ((4, 4, 192, 128), ScoreRules(scale=0.1), [(0, 512)], None),
}


def main(architecture: str, name: str) -> None:
    """Compile and launch both passes of one case; flash-attn stops short of the device."""
    (H, K, D, V), scores, documents, window = CASES[name]
    kernel = FlashKernel(FLASH4, capability=(int(architecture.removeprefix("sm_")) // 10, 0))
    request = KernelRequest("cuda", torch.bfloat16, D, H, K, V, window=window is not None, rules=scores.rules)
    assert kernel.supports(request) is None, kernel.supports(request)
    table = slice_table([AttentionSlice(a, b, a, b, 0, window) for a, b in documents])
    slices_to_calls(table, relative_positions=False)  # reads the table's numbers, which fake tensors have not
    with FakeTensorMode(allow_non_fake_inputs=True):
        shapes = ((1, 512, H, D), (1, 512, K, D), (1, 512, K, V), (1, 512, H, V))
        q, k, v, dout = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
        out, lse = kernel.forward(q, k, v, table, scores=scores)
        grads = kernel.backward(dout, q, k, v, out, lse, table, scores=scores)
    assert (out.shape, lse.shape) == (dout.shape, q.shape[:3])
    assert [x.shape for x in grads[:3]] == [q.shape, k.shape, v.shape]
    say("compiled", architecture, name)


if __name__ == "__main__":
    main(*sys.argv[1:])
