"""The loss as a GPU computes it, on tensors of a CPU: eager and through compiled regions, against float64."""

from __future__ import annotations

import pytest
import torch

from longctx.kernels.cross_entropy import loss_sums
from longctx.kernels.loss_options import PLAIN
from longctx.kernels.regions import Regions, call_function
from tests.as_on_a_gpu import computing_as_on_a_gpu
from tests.longctx.kernels.test_cross_entropy import ALL, inputs, relative_error, whole
from tests.rounding import rounded

BOUNDS = {torch.float64: 1e-12, torch.float32: 5e-7, torch.bfloat16: rounded(4)}
"""In bfloat16 the logits are rounded, the gradient that takes their place, its product and the result: four times."""
RUNS = {"eager": call_function, "compiled": Regions("aot_eager")}


@pytest.fixture(autouse=True)
def no_graphs_of_others():
    torch.compiler.reset()


@pytest.mark.few(6)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "all"])
# Chunks that divide the tokens or leave a shorter last one, or one of a single token; rows of whole pages and others.
@pytest.mark.parametrize(("vocab", "tokens", "chunk"), [(97, 61, 16), (4096, 33, 16), (4096, 7, 16)])
def test_loss_and_gradients(vocab, tokens, chunk, options, dtype, run):
    hidden, weight, targets = inputs(dtype, tokens=tokens, width=32, vocab=vocab, ignored=(0, 5))
    with torch.no_grad():
        weight.mul_(0.18)  # logits of standard deviation 1
    with computing_as_on_a_gpu():
        objective, nll = loss_sums(hidden, weight, targets, options=options, chunk_tokens=chunk, run=RUNS[run])
        grads = torch.autograd.grad(objective * 3.5, (hidden, weight))
    (wanted, *wanted_grads), wanted_nll = whole(hidden, weight, targets, options, factor=3.5)
    for got, want in zip((objective.detach(), nll, *grads), (wanted, wanted_nll, *wanted_grads), strict=True):
        assert relative_error(got, want) < BOUNDS[dtype]


def test_a_wide_total_is_not_rounded_between_chunks():
    """512 chunks: sums in bfloat16 would be off by 5e-2, and products that are rounded first by one rounding each."""
    hidden, weight, targets = inputs(torch.bfloat16, tokens=1024, width=4, vocab=8, ignored=[])
    with computing_as_on_a_gpu():
        objective, _ = loss_sums(hidden, weight, targets, chunk_tokens=2)
        got = torch.autograd.grad(objective, weight)[0]
    assert relative_error(got, whole(hidden, weight, targets)[0][2]) < rounded(1)


def test_cuda_has_a_product_of_its_own_for_it(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "addmm", lambda total, a, b, **options: asked.append((total, a, b, options)))
    on_cuda = torch.library.get_kernel("longctx::add_upcast_matmul_", "CUDA")
    total, a, b = torch.zeros(2, 3), torch.zeros(2, 4).bfloat16(), torch.zeros(4, 3).bfloat16()
    on_cuda.call_boxed(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), total, a, b)
    assert len(asked) == 1
    assert asked[0][3]["out_dtype"] == torch.float32
    assert asked[0][3]["out"].data_ptr() == total.data_ptr()
