"""What a kernel allocates inside its backward call, beside tensors counted by hand, and where a plan counts it."""

from __future__ import annotations

import dataclasses

import pytest

from launcher.config.load_config import load_run_config
from launcher.plan.estimate import estimate_run, fits
from launcher.plan.hardware import load_hardware
from launcher.plan.planned_world import World
from launcher.plan.workspace import BackwardCall, backward_workspace, expected_kernel

GIB = 2**30
LLAMA = BackwardCall(
    num_queries=32768,
    num_keys=32768,
    num_sequences=1,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    value_dim=128,
    itemsize=2,
)


@pytest.mark.parametrize(
    ("tokens", "groups", "wanted"),
    [(32768, 1, 1.0), (131072, 1, 4.0), (131072, 8, 0.5), (524288, 8, 2.0), (1048576, 8, 4.0)],
)
def test_flash_attention_2_takes_32_kib_a_token_of_32_heads(tokens, groups, wanted):
    call = dataclasses.replace(
        LLAMA, num_queries=tokens, num_keys=tokens, num_heads=32 // groups, num_kv_heads=8 // groups
    )
    # Above the round figure: a number for each query and head (0.4 %), and 128 more queries.
    assert wanted < backward_workspace("cuda_flash", call) / GIB < 1.007 * wanted


def test_its_tensors_one_by_one():
    call = dataclasses.replace(LLAMA, num_queries=100, num_keys=70, num_sequences=3, head_dim=80, value_dim=80)
    queries = 100 + 3 * 128
    # dq_accum [queries, heads, 96] and softmax_d [heads, queries]; dk and dv [keys, query heads, 80] in bfloat16.
    wanted = 4 * queries * 32 * 96 + 4 * 32 * queries + 2 * 2 * 70 * 32 * 80
    assert backward_workspace("flash2", call) == wanted
    alone = dataclasses.replace(call, num_kv_heads=32)
    assert backward_workspace("flash2", alone) == wanted - 2 * 2 * 70 * 32 * 80, "no copies for heads that share no key"
    # 148 multiprocessors over 96 sequences and heads: two sums of dq.
    assert backward_workspace("flash2_deterministic", call) == wanted + 4 * queries * 32 * 96


def test_other_kernels_sum_keys_by_key_heads_in_float32():
    rows = 32768 + 2 * 128
    assert backward_workspace("flash3", LLAMA) == 4 * rows * (32 * 130 + 8 * 256)
    assert backward_workspace("cudnn", LLAMA) == 32768 * (4 * 32 * 129 + 2 * 32 * 256)
    assert backward_workspace("blockwise", LLAMA) == 0, "its temporaries are operators' results"


def config(*flags: str):
    words = ["--config", "quickstart", "--model.preset", "llama-3.1-8b", "--parallel.expert", "1"]
    words += ["--parallel.context", "1", "--data.seq_len", "131072", "--train.tokens_per_step", "131072"]
    return load_run_config([*words, "--train.dtype", "bfloat16", "--train.keep", "attention", *flags])


@pytest.mark.parametrize(
    ("flags", "kernel"),
    [
        ((), "cuda_flash"),
        (("--parallel.kernel", "cudnn"), "cudnn"),
        (("--train.dtype", "float32"), "flex"),
        (("--model.attention_softcap", "30"), "flex"),
        (("--parallel.deterministic", "true"), "flash2_deterministic"),
    ],
)
def test_the_kernel_that_a_plan_counts(flags, kernel):
    assert expected_kernel(config(*flags)) == kernel


def test_many_short_documents_take_more_than_one():
    """128 more queries each: 2 MiB of 32 heads."""
    world, hardware = World(ranks=1, ranks_per_node=1), load_hardware("h100")
    chunks = ("--train.chunk_tokens", "8192", "--train.head_groups", "1", "--train.store", "host")
    one, many = (estimate_run(config(*chunks), world, hardware, document_tokens=n) for n in (0, 64))
    more = many.peak_bytes - one.peak_bytes
    assert more == pytest.approx(2047 * 128 * 32 * 129 * 4, rel=0.001)
    roomy = dataclasses.replace(hardware, memory_bytes=one.peak_bytes + more / 2, host_memory_bytes=1e15)
    assert fits(one.config, world, roomy)
    assert not fits(many.config, world, roomy, document_tokens=64)


def test_seconds_are_those_of_the_kernel():
    world, hardware = World(ranks=1, ranks_per_node=1), load_hardware("h100")
    plain, cudnn, flash3 = (
        estimate_run(config("--parallel.kernel", name), world, hardware).seconds.attention
        for name in ("auto", "cudnn", "flash3")
    )
    assert flash3 < cudnn < plain
    work = 1 / hardware.attention_flops.at() + 2.5 / hardware.attention_backward_flops.at()
    of_flash3 = 1 / 600e12 + 2.5 / 450e12
    assert plain / flash3 == pytest.approx(work / of_flash3, rel=1e-3)
