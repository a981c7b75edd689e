"""Throughput formulas against cases small enough to count by hand."""

from __future__ import annotations

import pytest
import torch

from launcher import throughput
from longctx.config import ModelConfig

DENSE = ModelConfig(
    vocab_size=10, hidden_size=4, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=6, ffn_size=5, qkv_bias=False
)
MOE = ModelConfig(
    vocab_size=10,
    hidden_size=4,
    num_layers=3,
    num_heads=2,
    num_kv_heads=2,
    head_dim=2,
    num_experts=8,
    experts_per_token=2,
    expert_ffn_size=3,
    shared_ffn_size=7,
)


def test_matmul_parameters_dense() -> None:
    # q 4·12, k 4·6, v 4·6, o 12·4 = 144; SwiGLU 3·4·5 = 60; head 10·4.
    assert throughput.matmul_parameters(DENSE) == 2 * (144 + 60) + 40


def test_matmul_parameters_count_active_experts_only() -> None:
    # q k v o 4·16 = 64; router 4·8 = 32; two experts 2·3·4·3 = 72; shared 3·4·7 and its gate 4 = 88; head 40.
    assert throughput.matmul_parameters(MOE) == 3 * (64 + 32 + 72 + 88) + 40


def test_matmul_parameters_without_shared_expert() -> None:
    config = ModelConfig(vocab_size=10, hidden_size=4, num_layers=1, head_dim=2, num_experts=4, expert_ffn_size=3)
    # heads 2, key/value heads 1: 2·4·2·3 = 48; router 16; two experts 72; head 40.
    assert throughput.matmul_parameters(config) == 48 + 16 + 72 + 40


@pytest.mark.parametrize("tied", [True, False])
def test_output_head_counts_once_tied_or_not(tied: bool) -> None:
    config = ModelConfig(tie_embeddings=tied)
    assert throughput.matmul_parameters(config) == throughput.matmul_parameters(ModelConfig())


def test_pairs_by_counting() -> None:
    lengths = throughput.document_lengths(torch.tensor([0, 3, 4, 8]).tolist())
    assert lengths == [3, 1, 4]
    counted = sum(1 for n in lengths for i in range(n) for j in range(n) if j <= i)
    assert throughput.attended_pairs(lengths) == counted == 17
    assert throughput.mean_context([0, 3, 4, 8]) == 17 / 8
    assert throughput.mean_context(torch.tensor([0, 3, 4, 8])) == 17 / 8


def test_mean_context_of_nothing() -> None:
    assert throughput.mean_context([0]) == 0.0


def test_training_flops_by_hand() -> None:
    # One document of 3 tokens, 6 pairs. Forward: 2·448·3 in matmuls; layers · heads · pairs · (2·2·6) in attention.
    forward = 2 * 448 * 3 + 2 * 2 * 6 * (2 * 2 * 6)
    assert throughput.training_flops(DENSE, [3]) == 3 * forward


def test_packing_costs_less_attention_than_one_document() -> None:
    assert throughput.training_flops(DENSE, [4, 4]) < throughput.training_flops(DENSE, [8])


@pytest.mark.parametrize("config", [DENSE, MOE])
def test_per_token_and_total_agree(config: ModelConfig) -> None:
    cu_seqlens = [0, 100, 101, 512]
    per_token = throughput.model_flops_per_token(config, mean_context=throughput.mean_context(cu_seqlens))
    assert per_token * 512 == pytest.approx(
        throughput.training_flops(config, throughput.document_lengths(cu_seqlens)), rel=1e-12
    )


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
        ("NVIDIA H200", "bfloat16", 989.4),
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
