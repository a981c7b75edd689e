"""Whole models with the arithmetic of a GPU, on tensors of a CPU: losses and every gradient against float64.

The branches that CUDA tensors take run by their own code: the loss over whole chunks, the head's gradient with a wider
total, PyTorch's own RMSNorm, native bfloat16, grouped experts. Eager here; compiled regions too in the slow part.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch

from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution, TrainingPass
from longctx.objectives.causal_lm import CausalLM
from tests.as_on_a_gpu import computing_as_on_a_gpu
from tests.longctx.samples import dense_config, gradients, packed_batch, randomize, step_loss, tiny_config

MODELS = {
    "tied, dropout": dense_config(residual_dropout=0.2),
    "untied, soft cap, scale": dense_config(tie_embeddings=False, logit_softcap=5.0, logit_scale=0.7),
    "window, sinks, soft cap": dense_config(layers=("window", "full"), window=5, sinks=True, attention_softcap=3.0),
    "sandwich, offset, q and k norm": dense_config(norm_order="sandwich", norm_offset=True, qk_norm="head"),
    "ALiBi": dense_config(position="alibi"),
    "T5, post": dense_config(position="t5", norm_order="post"),
    "layernorm, learned": dense_config(
        norm="layernorm", activation="gelu_tanh", position="learned", ffn_bias=True, o_bias=True
    ),
    "experts, jitter": tiny_config(residual_dropout=0.1, router_jitter=0.1),
    "experts, capacity, post": tiny_config(capacity_factor=1.0, norm_order="post"),
    "experts, biases": tiny_config(expert_bias=True, activation="swiglu_oai", shared_ffn_size=0),
    "experts, most of them empty": tiny_config(num_experts=16, tie_embeddings=False),
    "latent": tiny_config(
        num_kv_heads=4, q_lora_rank=16, kv_lora_rank=12, rope_head_dim=4, value_head_dim=8, dense_layers=(0,)
    ),
    "linear": dense_config(layers=("linear", "full")),
}
QUICK = ("untied, soft cap, scale", "sandwich, offset, q and k norm", "experts, jitter", "experts, most of them empty")
BATCHES = (
    packed_batch([[40, 1, 23]], seed=1),
    packed_batch([[1]], seed=2),
    packed_batch([[2, 31, 1, 1, 7]], padding=3, seed=3),
    packed_batch([[9, 14], [20, 3]], padding=1, seed=4),
    packed_batch([[61]], seed=5),
)
# Sums in another order: a thousand of them in float64 and float32. In bfloat16 every product is rounded, and routing
# may flip: that bound finds what is wrong, and not what is imprecise (tests/longctx/kernels do).
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.6}


def train(name: str, execution: Execution, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """The loss and all gradients of each batch, with one model."""
    lm = CausalLM(Decoder(MODELS[name], execution=execution), z_loss=1e-2, label_smoothing=0.1)
    randomize(lm)
    lm.to(dtype)
    found = []
    for step, batch in enumerate(BATCHES):
        lm.zero_grad(set_to_none=True)
        sums = lm.loss_sum(lm(batch, TrainingPass(seed=step)))
        step_loss(sums, 0.1, 0.01).backward()
        found.append({"loss": sums["nll"].detach(), **gradients(lm)})
    return found


@cache
def in_float64(name: str) -> list[dict[str, torch.Tensor]]:
    """The same as a CPU computes it."""
    return train(name, Execution(matmul_mode="native"), torch.float64)


def check(name: str, execution: Execution, dtype: torch.dtype) -> None:
    """Compare with float64, each tensor by its norm; one that is 0 in theory by a thousandth of the largest one's."""
    wanted = in_float64(name)
    with computing_as_on_a_gpu():
        found = train(name, execution, dtype)
    for got, want in zip(found, wanted, strict=True):
        largest = max(float(x.norm()) for key, x in want.items() if key != "loss")
        for key, x in want.items():
            error = float((got[key].double() - x).norm() / (x.norm() + 1e-3 * largest + 1e-9))
            assert error <= BOUNDS[dtype], f"{key} is off by {error:.1e} of its norm"


def execution_of(keep, chunk_tokens, head_groups, *, compiler=None, recompute="activation") -> Execution:
    return Execution(
        keep,
        chunk_tokens=chunk_tokens,
        head_groups=head_groups,
        matmul_mode="native",
        recompute_experts="none" if keep == "all" and not chunk_tokens else recompute,
        compiler=compiler,
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", QUICK)
def test_losses_and_gradients(name, dtype):
    check(name, execution_of("attention", 13, 2), dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("chunk_tokens", "head_groups"), [(0, 1), (7, 1), (13, 2)])
@pytest.mark.parametrize("keep", ["all", "attention", "inputs"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_of_every_model(name, keep, chunk_tokens, head_groups):
    for dtype, recompute in product(BOUNDS, ("activation", "all")):
        check(name, execution_of(keep, chunk_tokens, head_groups, recompute=recompute), dtype)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("keep", "chunk_tokens"), [("all", 0), ("attention", 13), ("inputs", 7)])
@pytest.mark.parametrize("name", MODELS)
def test_compiled_losses_and_gradients_of_every_model(name, keep, chunk_tokens):
    for dtype in BOUNDS:
        torch.compiler.reset()
        check(name, execution_of(keep, chunk_tokens, 1, compiler="aot_eager"), dtype)
