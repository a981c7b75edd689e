"""Throughput formulas against what PyTorch counts and what can be counted by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from launcher.metrics import throughput
from longctx.architecture.mixers.softmax_mixer import attended_pairs
from longctx.config import ModelConfig
from longctx.model.attention.mask import AttentionMask
from longctx.model.decoder import Decoder
from longctx.objectives.classes import Classes
from tests.longctx.attention_cores import MaskIsPlan
from tests.longctx.image_samples import PATCHES, WINDOWS, image_stream, swin_config, vit_config


@pytest.mark.parametrize("window", [1, 2, 3, 5, 7, 50])
@pytest.mark.parametrize("stride", [0, 1, 2, 3, 7, 11])
def test_pairs_of_a_window_and_a_stride_by_counting(window: int, stride: int) -> None:
    lengths = [0, 1, 2, 7, 20, 31]

    def sees(distance: int) -> bool:
        return distance < window or (stride > 0 and distance % stride == 0)

    counted = sum(1 for n in lengths for i in range(n) for j in range(i + 1) if sees(i - j))
    assert attended_pairs(lengths, window=window, stride=stride) == counted
    both = sum(1 for n in lengths for i in range(n) for j in range(n) if sees(abs(i - j)))
    assert attended_pairs(lengths, window=window, stride=stride, causal=False) == both


class Plain(MaskIsPlan):
    """Attention, one query after the other, over the keys that it sees and no others; linear attention as a state."""

    def __init__(self, *, linear: bool) -> None:
        self.linear = linear

    def __call__(self, q_BtHD: Tensor, k_BtKD: Tensor, v_BtKV: Tensor, *, plan: AttentionMask, **_: Any) -> Tensor:
        (q, k, v), out = (x.flatten(0, 1) for x in (q_BtHD, k_BtKD, v_BtKV)), []
        group = q.shape[1] // k.shape[1]
        for start, stop in pairwise(plan.documents.bounds):
            state = 0.0
            for i in range(start, stop):
                if self.linear:
                    state = state + torch.bmm(k[i].unsqueeze(-1), v[i].unsqueeze(-2))  # [K, D, V]
                    out.append(torch.bmm(q[i].unsqueeze(-2), state.repeat_interleave(group, 0)).squeeze(-2))
                    continue
                following = i + 1 if plan.causal else stop
                seen = [j for j in range(start, following) if _sees(plan, abs(i - j))]
                keys, values = (x[seen].transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))  # [H, S, D]
                out.append(torch.bmm(torch.bmm(q[i].unsqueeze(-2), keys.mT), values).squeeze(-2))
        return torch.stack(out).view(*q_BtHD.shape[:3], -1)


def _sees(mask: AttentionMask, distance: int) -> bool:
    near = mask.window is None or distance < mask.window
    return near or (mask.stride > 0 and distance % mask.stride == 0)


LATENT = {"num_kv_heads": 2, "head_dim": 6, "kv_lora_rank": 5, "rope_head_dim": 2, "value_head_dim": 3}
COUNTED: dict[str, dict[str, Any]] = {
    "dense": {"num_experts": 0},
    "no gate": {"num_experts": 0, "activation": "gelu", "ffn_bias": True, "o_bias": True},
    "experts": {},
    "experts alone": {"shared_ffn_size": 0, "qk_norm": "full"},
    "dense layers among experts": {"dense_layers": (1,), "shared_gate": False},
    "groups, sigmoid": {
        "score_function": "sigmoid", "selection_bias": True, "expert_groups": 2, "groups_per_token": 1,
        "router_bias": True, "expert_bias": True,
    },
    "window and full": {"layers": ("window", "full"), "window": 4},
    "window alone": {"layers": ("window",), "window": 1},
    "linear and full": {"layers": ("linear", "full"), "num_layers": 3},
    "sparse": {"layers": ("sparse", "full"), "window": 3, "sparse_stride": 2},
    "latent": LATENT,
    "latent, queries too": {**LATENT, "q_lora_rank": 3},
    "latent, values as wide as keys": {**LATENT, "value_head_dim": 0},
    "learned positions, untied": {"position": "learned", "tie_embeddings": False},
    "fewer outputs": {"activation": "quick_gelu", "num_experts": 0, "tie_embeddings": False, "output_vocab_size": 11},
    "relative": {"position": "relative", "hidden_size": 6},  # as wide as a head: see attention_flops
    "relative, window": {"position": "relative", "hidden_size": 6, "layers": ("window",), "window": 3},
    "sandwich": {"norm_order": "sandwich", "norm": "layernorm"},
}  # fmt: skip


@pytest.mark.few(4)
@pytest.mark.parametrize("name", COUNTED)
def test_training_flops_are_those_that_pytorch_counts(name: str) -> None:
    """Every product of a real forward and backward pass, with attention that multiplies nothing it does not need."""
    sizes = {"vocab_size": 13, "hidden_size": 10, "num_layers": 2, "num_heads": 2, "head_dim": 6, "ffn_size": 7}
    experts = {"num_experts": 4, "expert_ffn_size": 3, "shared_ffn_size": 5}
    config = ModelConfig(**{**sizes, **experts, **COUNTED[name]})
    lengths, total = [6, 1, 8], 15
    decoder = Decoder(config, {"softmax": Plain(linear=False), "linear": Plain(linear=True)})
    tokens = torch.randint(config.vocab_size, (1, total), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in lengths]).view(1, total)
    with FlopCounterMode(display=False) as counter:
        decoder.logits(decoder(tokens, positions, [0, 6, 7, 15])).sum().backward()
    assert throughput.training_flops(config, lengths) == counter.get_total_flops()


IMAGES: dict[str, ModelConfig] = {
    "class token": vit_config(num_experts=0, shared_ffn_size=0),
    "class token, experts": vit_config(shared_ffn_size=0),
    "means": vit_config(replace(PATCHES, class_token=False), num_experts=0, class_pool="mean", max_positions=15),
    "stages": swin_config(),
    "three stages": swin_config(replace(WINDOWS, height=24, depths=(1, 2, 1)), num_layers=4),
    "windows in one stage": swin_config(replace(WINDOWS, depths=(5,))),
}


@pytest.mark.parametrize("name", IMAGES)
def test_training_flops_of_images(name: str) -> None:
    """Pixels have no gradient, so one of the patch projection's three products is not made."""
    config = IMAGES[name]
    stream, _, _ = image_stream(config, 2)
    task = Classes(Decoder(config, {"softmax": Plain(linear=False)}))
    batch = task.prepare(stream)
    with FlopCounterMode(display=False) as counter:
        task.loss(task.loss_sum(task(batch)), task.count([batch])).backward()
    lengths = [config.image.num_tokens] * 2
    of_pixels = 2 * config.image.pixel_bytes * config.hidden_size * sum(lengths)
    assert throughput.training_flops(config, lengths) == counter.get_total_flops() + of_pixels


def test_rates() -> None:
    assert throughput.tokens_per_second(1000, 0.5) == 2000.0
    assert throughput.tokens_per_second(1000, 0.0) == 0.0
    assert throughput.model_tflops(8e12, 2.0, num_devices=4) == 1.0
    assert throughput.mfu(4e12, 2.0, 8e12) == 0.25
    assert throughput.mfu(4e12, 2.0, None) is None
    assert throughput.mfu(4e12, 0.0, 8e12) is None


@pytest.mark.parametrize(
    ("device", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756.5),
        ("NVIDIA GB200", "bfloat16", 2500.0),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312.0),
        ("NVIDIA H200", "float32", None),
        ("cpu", "bfloat16", None),
    ],
)
def test_peak_device_flops(device: str, dtype: str, tflops: float | None) -> None:
    peak = throughput.peak_device_flops(device, dtype)
    assert peak == (None if tflops is None else pytest.approx(tflops * 1e12))
