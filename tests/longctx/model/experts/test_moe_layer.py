"""The layer: router, experts and the shared expert together, by definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from longctx.model.experts.dispatch import ExpertRun, TokenDispatcher
from longctx.model.experts.moe_layer import MixtureOfExperts, MoECall
from longctx.model.experts.router import route
from longctx.model.layers.linear import set_matmul_mode
from tests.longctx.samples import gradients, randomize, tiny_config
from tests.rounding import both_ways

N, M, E = 29, 32, 4
DOCUMENTS = torch.zeros(1, N, dtype=torch.int64)


def build(dtype=torch.float64, **changes) -> MixtureOfExperts:
    module = MixtureOfExperts(tiny_config(**changes))
    randomize(module)
    return module.to(dtype)


def tokens(dtype=torch.float64, count: int = N) -> Tensor:
    x = torch.randn(1, count, M, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x.to(dtype).requires_grad_()


def ffn(gate_up: Tensor, down: Tensor, x: Tensor) -> Tensor:
    gate, up = (gate_up @ x).chunk(2)
    return down @ (silu(gate) * up)


def by_definition(module: MixtureOfExperts, x_BtM: Tensor) -> Tensor:
    """Token by token: the experts it is sent to, and the one that all visit."""
    logits = x_BtM[0] @ module.gate.weight.T
    routing = route(logits, module.config, bias_E=module.gate.e_score_correction_bias)
    rows = []
    for n, x in enumerate(x_BtM[0]):
        row = torch.zeros_like(x)
        for gate, e in zip(routing.gates_Nk[n], routing.experts_Nk[n].tolist(), strict=True):
            if e >= 0:
                row = row + gate * ffn(module.experts.gate_up_proj[e], module.experts.down_proj[e], x)
        if module.has_shared_expert:
            shared = module.shared_expert
            both = torch.cat((shared.gate_proj.weight, shared.up_proj.weight))
            factor = torch.sigmoid(module.shared_expert_gate.weight @ x) if module.has_shared_gate else 1.0
            row = row + factor * ffn(both, shared.down_proj.weight, x)
        rows.append(row)
    return torch.stack(rows)[None]


LAYERS = {
    "gated shared expert": {},
    "shared expert": {"shared_gate": False},
    "none shared": {"shared_ffn_size": 0},
    "sigmoid, scaled, biased": {"score_function": "sigmoid", "routed_scale": 2.5, "selection_bias": True},
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_its_definition(name):
    module, exact = build(**LAYERS[name]), build(**LAYERS[name])
    x, leaf = tokens(), tokens()
    out, wanted = module(x)[0], by_definition(exact, leaf)
    torch.testing.assert_close(out, wanted, rtol=1e-11, atol=1e-12)
    dout = torch.randn(1, N, M, dtype=torch.float64)
    out.backward(dout)
    wanted.backward(dout)
    torch.testing.assert_close(x.grad, leaf.grad, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(gradients(module), gradients(exact), rtol=1e-10, atol=1e-11)


@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_odd_widths_are_served(dtype, products):
    module = MixtureOfExperts(tiny_config(hidden_size=33, expert_ffn_size=7)).to(dtype)
    set_matmul_mode(module, products)
    randomize(module)
    x = torch.randn(2, 5, 33, dtype=dtype, requires_grad=True)
    out = module(x, MoECall(run=ExpertRun(TokenDispatcher(), matmul_mode=products)))[0]
    assert out.dtype == dtype
    out.float().square().sum().backward()
    assert all(g.isfinite().all() for g in gradients(module).values())


def test_no_token_gives_every_parameter_a_zero_gradient():
    module = build(router_z_loss_weight=0.1)
    call = MoECall(documents_Bt=torch.zeros(1, 0, dtype=torch.int64), num_documents=3)
    out, counts, prob_sums, z_sum, *diagnostics = module(tokens(count=0), call)
    assert counts.shape == prob_sums.shape == (3, E)
    assert [float(of) for of in diagnostics] == [0, 0, 0, 0]
    (out.sum() + prob_sums.sum() + z_sum).backward()
    assert all(g.count_nonzero() == 0 for g in gradients(module).values())
