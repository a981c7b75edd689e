"""One expert layer as longctx, transformers and DeepSpeed build it, with the same weights, inputs and choices.

Axes: N tokens, k experts per token, E experts, M model width, F width of one expert.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longctx.config import ModelConfig
from longctx.kernels.matmul import multiply
from longctx.kernels.processor import fastest_matmul_mode
from longctx.model.experts.dispatch import ExpertRun, TokenDispatcher

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TOLERANCE = {"bf16": 2e-2, "fp32": 1e-5}
"""Maximum relative (Frobenius) difference between two libraries' results."""
PRELOAD = (
    *("benchmarks.moe_layers", "deepspeed.moe.layer"),
    *("transformers.models.mixtral.modeling_mixtral", "transformers.models.qwen3_moe.modeling_qwen3_moe"),
)
"""Modules for the server from which workers are forked."""


@dataclass(frozen=True)
class Shape:
    """Sizes of an expert layer."""

    num_experts: int
    experts_per_token: int
    expert_ffn_size: int
    model_type: str
    """transformers' model with such a layer."""
    hidden_size: int = 512

    def __str__(self) -> str:
        return f"{self.num_experts} experts top-{self.experts_per_token}"

    def config(self) -> ModelConfig:
        """Return the layer's fields in our model config."""
        return ModelConfig(
            hidden_size=self.hidden_size,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            expert_ffn_size=self.expert_ffn_size,
        )


COARSE, FINE = Shape(16, 2, 1024, "mixtral"), Shape(64, 8, 256, "qwen3_moe")


@dataclass(frozen=True)
class Case:
    """A layer and its inputs."""

    shape: Shape
    tokens: int
    dtype: str
    skewed: bool

    def __str__(self) -> str:
        return f"{self.shape}, {self.tokens} tokens, {self.dtype}, {'Zipf' if self.skewed else 'even'}"

    @property
    def flops(self) -> float:
        """FLOPs of the experts' matmuls, forward and backward."""
        shape = self.shape
        return 18.0 * self.tokens * shape.experts_per_token * shape.hidden_size * shape.expert_ffn_size

    def weights(self) -> dict[str, Tensor]:
        """Return router [E, M], gate and up [E, 2F, M], down [E, M, F] in the case's dtype, the same in every process.

        The router's rows are orthonormal: each expert has its own direction.
        """
        E, M, F = self.shape.num_experts, self.shape.hidden_size, self.shape.expert_ffn_size
        g = torch.Generator().manual_seed(0)
        router_ME = torch.linalg.qr(torch.randn(M, E, generator=g))[0]
        gate_up = torch.randn(E, 2 * F, M, generator=g).mul_(M**-0.5)
        down = torch.randn(E, M, F, generator=g).mul_(F**-0.5)
        named = {"router": router_ME.T.contiguous(), "gate_up": gate_up, "down": down}
        return {name: weight.to(DTYPES[self.dtype]) for name, weight in named.items()}

    def chosen(self) -> Tensor:
        """Return the experts [N, k] to which each token's direction points."""
        shape = self.shape
        draw = zipf_choices if self.skewed else even_choices
        return draw(self.tokens, shape.num_experts, shape.experts_per_token)

    def inputs(self) -> tuple[Tensor, Tensor]:
        """Return tokens and the output's gradient, both [N, M].

        A token is noise, less of it along the router's rows, and 4 of each of its experts' rows: logits and so gates
        differ, but rounding a logit to bfloat16 never changes a choice.
        """
        g = torch.Generator().manual_seed(1)
        router_EM = self.weights()["router"].float()
        x_NM, dout_NM = (torch.randn(self.tokens, self.shape.hidden_size, generator=g) for _ in range(2))
        x_NM -= 0.75 * (x_NM @ router_EM.T) @ router_EM
        for experts_N in self.chosen().T:
            x_NM += 4 * router_EM[experts_N]
        return x_NM.to(DTYPES[self.dtype]), dout_NM.to(DTYPES[self.dtype])


def even_choices(tokens: int, num_experts: int, k: int) -> Tensor:
    """Return k different experts per token, [N, k]; each expert is chosen k times by every ``num_experts`` tokens."""
    g = torch.Generator().manual_seed(2)
    blocks = -(-tokens // num_experts)
    ids_bE = torch.rand(blocks, num_experts, generator=g).argsort(1)
    turns_bk = torch.rand(blocks, num_experts, generator=g).argsort(1)[:, :k]
    slots_bEk = (torch.arange(num_experts)[None, :, None] + turns_bk[:, None]) % num_experts
    return ids_bE[:, :, None].expand(-1, -1, k).gather(1, slots_bEk).flatten(0, 1)[:tokens]


def zipf_choices(tokens: int, num_experts: int, k: int) -> Tensor:
    """Return k different experts per token, [N, k], drawn with weights 1, 1/2, 1/3 … in a shuffled order of experts."""
    g = torch.Generator().manual_seed(3)
    rank_E = torch.randperm(num_experts, generator=g)
    log_weight_E = -torch.log1p(rank_E.float())
    noise_NE = -torch.log(-torch.log(torch.rand(tokens, num_experts, generator=g).clamp(1e-9, 1 - 1e-7)))
    return (log_weight_E + noise_NE).topk(k, dim=1).indices


@dataclass(frozen=True)
class Layer:
    """A layer as one library builds it."""

    module: nn.Module
    forward: Callable[[Tensor], Tensor]
    """[N, M] → [N, M]."""
    gradients: Callable[[], dict[str, Tensor]]
    """Gradients of router, gate_up and down, stacked as in ``Case.weights``."""
    counts: Callable[[Tensor], Tensor]
    """Returns the number of tokens [N, M] that choose each expert, [E]."""


def step(layer: Layer, x_NM: Tensor, dout_NM: Tensor) -> tuple[Tensor, Tensor]:
    """Run forward and backward; return the output and the tokens' gradient."""
    x = x_NM.detach().requires_grad_()
    out = layer.forward(x)
    out.backward(dout_NM)
    assert x.grad is not None
    return out.detach(), x.grad


def longctx_layer(case: Case, dispatcher: TokenDispatcher | None = None) -> Layer:
    """Build ``longctx.model.experts.moe_layer.MixtureOfExperts``, with its statistics for one document.

    With a dispatcher it holds only this rank's experts and their gradients.
    """
    from longctx.model.experts.moe_layer import MixtureOfExperts, MoECall

    dispatcher = TokenDispatcher() if dispatcher is None else dispatcher
    weights = {n: w if n == "router" else w[dispatcher.local_experts] for n, w in case.weights().items()}
    module = MixtureOfExperts(case.shape.config(), dispatcher.local_experts).to(DTYPES[case.dtype])
    fill(module, {"gate.weight": "router", "experts.gate_up_proj": "gate_up", "experts.down_proj": "down"}, weights)
    run = ExpertRun(dispatcher, matmul_mode=fastest_matmul_mode())

    def call(x_NM: Tensor) -> tuple[Tensor, ...]:
        documents_Bt = torch.zeros(1, len(x_NM), dtype=torch.long)
        return module(x_NM.unsqueeze(0), MoECall(run=run, documents_Bt=documents_Bt, num_documents=1))

    return Layer(
        module,
        lambda x_NM: call(x_NM)[0].squeeze(0),
        lambda: _fused_gradients(module),
        lambda x_NM: call(x_NM)[1].sum(0),
    )


def transformers_layer(case: Case) -> Layer:
    """Build transformers' MoE layer of Mixtral or Qwen3-MoE with ``grouped_mm``."""
    import transformers
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    shape = case.shape
    sizes: dict[str, Any] = {"hidden_size": shape.hidden_size, "num_experts_per_tok": shape.experts_per_token}
    if shape.model_type == "mixtral":
        sizes |= {"num_local_experts": shape.num_experts, "intermediate_size": shape.expert_ffn_size}
    else:
        sizes |= {"num_experts": shape.num_experts, "moe_intermediate_size": shape.expert_ffn_size}
        sizes |= {"norm_topk_prob": True}
    config: Any = transformers.AutoConfig.for_model(shape.model_type, **sizes)
    config._experts_implementation = "grouped_mm"
    block = MixtralSparseMoeBlock if shape.model_type == "mixtral" else Qwen3MoeSparseMoeBlock
    module = block(config).to(DTYPES[case.dtype])
    names = {"gate.weight": "router", "experts.gate_up_proj": "gate_up", "experts.down_proj": "down"}
    fill(module, names, case.weights())

    def counts(x_NM: Tensor) -> Tensor:
        return module.gate(x_NM)[2].flatten().bincount(minlength=shape.num_experts)

    return Layer(module, lambda x: module(x.unsqueeze(0)).squeeze(0), lambda: _fused_gradients(module), counts)


def _fused_gradients(module: Any) -> dict[str, Tensor]:
    parameters = {
        "router": module.gate.weight,
        "gate_up": module.experts.gate_up_proj,
        "down": module.experts.down_proj,
    }
    return {name: parameter.grad for name, parameter in parameters.items()}


class Expert(nn.Module):
    """One gated FFN, which DeepSpeed's layer copies."""

    def __init__(self, hidden_size: int, ffn_size: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * ffn_size, bias=False)
        self.down = nn.Linear(ffn_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the expert's output for its tokens."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)


def deepspeed_layer(case: Case) -> Layer:
    """Build ``deepspeed.moe.layer.MoE`` that drops no token, in a process group of one."""
    import deepspeed.comm
    from deepspeed.moe.layer import MoE

    shape = case.shape
    with contextlib.redirect_stdout(sys.stderr):  # it prints what it builds
        deepspeed.comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        module = MoE(
            shape.hidden_size,
            Expert(shape.hidden_size, shape.expert_ffn_size),
            num_experts=shape.num_experts,
            k=shape.experts_per_token,
            drop_tokens=False,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        ).to(DTYPES[case.dtype])
        module.set_deepspeed_parallelism()
    inside: Any = module.deepspeed_moe
    experts, router, weights = inside.experts.deepspeed_experts, inside.gate.wg, case.weights()
    with torch.no_grad():
        router.weight.copy_(weights["router"])
        for expert, gate_up, down in zip(experts, weights["gate_up"], weights["down"], strict=True):
            expert.gate_up.weight.copy_(gate_up)
            expert.down.weight.copy_(down)

    def gradients() -> dict[str, Tensor]:
        stacked = {"gate_up": [e.gate_up.weight.grad for e in experts], "down": [e.down.weight.grad for e in experts]}
        assert router.weight.grad is not None
        return {"router": router.weight.grad} | {name: torch.stack(of) for name, of in stacked.items()}

    return Layer(module, lambda x: module(x)[0], gradients, lambda x: module(x)[2])


def fill(module: nn.Module, names: dict[str, str], weights: dict[str, Tensor]) -> None:
    """Copy weights into all parameters of a module, given by parameter name."""
    parameters = dict(module.named_parameters())
    assert parameters.keys() == names.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[names[name]])


OURS, THEIRS, DEEPSPEED = "longctx", "transformers", "DeepSpeed"
LAYERS: dict[str, Callable[[Case], Layer]] = {
    OURS: longctx_layer,
    THEIRS: transformers_layer,
    DEEPSPEED: deepspeed_layer,
}


def dense_products(case: Case) -> Callable[[], None]:
    """Compute the limit: as many FLOPs in six dense matmuls, those of an FFN of width k·F forward and backward.

    Without activation or router. In bfloat16 on a processor without instructions for it, operands are converted,
    multiplied in float32 and results rounded: several times faster than PyTorch's own bfloat16 matmul there.
    """
    dtype = DTYPES[case.dtype]
    N, M, F = case.tokens, case.shape.hidden_size, case.shape.experts_per_token * case.shape.expert_ffn_size
    g = torch.Generator().manual_seed(0)
    sizes = ((N, M), (N, M), (N, F), (N, 2 * F), (2 * F, M), (M, F))
    x, dy, h, dgate_up, gate_up, down = (torch.randn(s, generator=g).to(dtype) for s in sizes)

    def products() -> None:
        for a, b in ((x, gate_up.T), (h, down.T), (dy, down), (dy.T, h), (dgate_up, gate_up), (dgate_up.T, x)):
            multiply(a, b.T, matmul_mode=fastest_matmul_mode())

    return products
