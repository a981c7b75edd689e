"""Products in both ways, and RMSNorm: against float64, in values, gradients and what is kept for backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from longctx.kernels import cross_entropy, grouped, matmul
from longctx.kernels.matmul import linear
from longctx.kernels.rms_norm import rms_norm
from longctx.model.decoder import Decoder
from longctx.model.experts import expert_blocks
from longctx.model.layers.linear import Linear, set_matmul_mode
from longctx.model.layers.norms import RMSNorm
from longctx.model.training_pass import Execution
from longctx.objectives.causal_lm import CausalLM
from tests.longctx.samples import packed_batch, tiny_config
from tests.rounding import UNIT, both_ways


@pytest.fixture
def small_tiles(monkeypatch):
    """Three rows are converted at once."""
    monkeypatch.setattr(matmul, "_ROWS", 3)


@both_ways
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [(0,), (1,), (2, 4), (7,)], ids=str)
def test_bfloat16_products_are_rounded_once(rows, biased, products, small_tiles):
    """Natively a bias may be added to the rounded product: twice."""
    torch.manual_seed(0)
    layer = Linear(5, 6, bias=biased)
    set_matmul_mode(layer, products)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    layer.bfloat16()
    x, dy = torch.randn(*rows, 5).bfloat16().requires_grad_(), torch.randn(*rows, 6).bfloat16()
    layer(x).backward(dy)
    exact = [t.detach().double().requires_grad_() for t in (x, *layer.parameters())]
    wanted = nn.functional.linear(*exact)
    wanted.backward(dy.double())
    if products == "float32" or not biased:
        torch.testing.assert_close(layer(x).double(), wanted.bfloat16().double(), atol=0, rtol=2 * UNIT)  # a neighbour
    else:
        sizes = exact[0].abs() @ exact[1].abs().T + exact[2].abs()  # none of the two that are rounded is larger
        assert ((layer(x).double() - wanted).abs() <= 2 * UNIT * sizes).all()
    for got, leaf in zip((x, *layer.parameters()), exact, strict=True):
        if got.numel():
            assert (got.grad.double() - leaf.grad).abs().max() <= UNIT * leaf.grad.abs().max()


@both_ways
def test_only_what_needs_a_gradient_gets_one(products, small_tiles):
    x, weight = torch.randn(4, 5).bfloat16(), torch.randn(6, 5).bfloat16().requires_grad_()
    linear(x, weight, matmul_mode=products).sum().backward()
    assert x.grad is None
    assert weight.grad is not None
    x, weight = x.requires_grad_(), weight.detach()
    linear(x, weight, matmul_mode=products).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    ("dtype", "products"), [(torch.float32, "float32"), (torch.float32, "native"), (torch.bfloat16, "native")], ids=str
)
def test_other_dtypes_and_the_native_way_take_pytorchs_product(dtype, products):
    x, weight = torch.randn(4, 5).to(dtype), torch.randn(6, 5).to(dtype)
    assert torch.equal(linear(x, weight, matmul_mode=products), nn.functional.linear(x, weight))


@both_ways
def test_a_model_multiplies_as_it_was_told(products, monkeypatch):
    """Every linear layer, gated ones too, the head and the experts; forward and backward."""
    formed = []
    plain = matmul.multiplies_in_float32
    for module in (matmul, grouped, cross_entropy, expert_blocks):
        told = lambda x, products: formed.append((x.dtype, products)) or plain(x, products)  # noqa: E731
        monkeypatch.setattr(module, "multiplies_in_float32", told)
    for config in (tiny_config(), tiny_config(num_experts=0, ffn_size=48, shared_ffn_size=0)):
        model, batch = (
            CausalLM(Decoder(config, execution=Execution(matmul_mode=products)).bfloat16()),
            packed_batch([[5, 11]]),
        )
        model(batch)[0].backward()
        model.network.logits(torch.randn(1, 3, config.hidden_size).bfloat16())
    assert set(formed) == {(torch.bfloat16, products)}
    assert model.network.cores["softmax"].matmul_mode == products


@pytest.mark.parametrize("offset", [False, True])
def test_norm_values_and_gradients(offset):
    torch.manual_seed(0)
    x, weight = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5, 7), (7,)))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-6, offset=offset), (x, weight))
    wanted = nn.functional.rms_norm(x, (7,), weight + 1 if offset else weight, 1e-6)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6, offset=offset), wanted)


@pytest.mark.parametrize("rows", [1, 8, 32, 33])
def test_norm_of_generated_tokens(rows):
    """Generation takes other operations for few rows; outside of it bits do not depend on how many rows there are."""
    torch.manual_seed(0)
    x, weight = torch.randn(1, rows, 64), torch.randn(64)
    wanted = nn.functional.rms_norm(x.double(), (64,), weight.double(), 1e-6)
    with torch.inference_mode():
        torch.testing.assert_close(rms_norm(x, weight, 1e-6).double(), wanted, atol=1e-6, rtol=1e-6)
    with torch.no_grad():
        assert torch.equal(rms_norm(x, weight, 1e-6)[:, :1], rms_norm(x[:, :1], weight, 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_norm_has_the_same_gradients(dtype):
    x, weight = (torch.randn(s).to(dtype).requires_grad_() for s in ((5, 64), (64,)))

    def gradients(norm):
        # Multiplied first: a graph's own input would not be overwritten.
        return torch.autograd.grad(norm(x * 2, weight, 1e-6).float().sin().sum(), (x, weight))

    compiled = torch.compile(rms_norm, backend="eager", fullgraph=True)
    torch.testing.assert_close(gradients(compiled), gradients(rms_norm))


def test_norm_keeps_its_input_and_one_number_a_row():
    kept = []
    norm = RMSNorm(64, eps=1e-6).bfloat16()
    nn.init.ones_(norm.weight)
    x = torch.randn(128, 64).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        norm(x)
    assert sum(t.numel() * t.element_size() for t in kept) == 128 * 64 * 2 + 64 * 2 + 128 * 4
