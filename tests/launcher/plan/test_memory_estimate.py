"""Bytes of a rank by arithmetic, and the refusal of a run that does not fit."""

from __future__ import annotations

import pytest
import torch

from launcher.config.load_config import load_run_config
from launcher.plan import memory_estimate
from launcher.plan.memory_estimate import GIB, Memory, check_memory, gib, memory_by_stage, memory_of_rank, why_too_large
from longctx.architecture.size import count_parameters
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from tests.launcher.runs import SCREEN, resolved
from tests.longctx.samples import dense_config, tiny_config

LLAMA = ["--model.preset", "llama-2-7b", "--data.seq_len", "4096", "--train.tokens_per_step", "4096"]
P = 6_738_415_616


def need(flags: list[str], world_size: int = 2) -> Memory:
    config = resolved(load_run_config(flags))
    return memory_of_rank(config, config.model.config(), world_size)


@pytest.mark.parametrize(
    ("stage", "dtype", "weights", "gradients", "optimizer"),
    [
        (0, "float32", 4 * P, 4 * P, 8 * P),
        (1, "float32", 4 * P, 4 * P, 12 * P // 2),
        (1, "bfloat16", 2 * P, 4 * P, 12 * P // 2),
        (2, "bfloat16", 2 * P, 4 * P // 2, 12 * P // 2),
        (3, "bfloat16", 2 * P // 2, 4 * P // 2, 12 * P // 2),
    ],
)
def test_what_each_stage_holds_of_seven_billion_parameters(stage, dtype, weights, gradients, optimizer):
    own = need([*LLAMA, "--zero.stage", str(stage), "--train.dtype", dtype, "--parallel.context", "2"])
    assert (own.weights, own.gradients, own.optimizer) == (weights, gradients, optimizer)
    assert own.building == (own.weights if stage == 3 else 0), "nothing is ever whole but a tensor"
    assert own.masters == (own.optimizer // 3 if stage else 0)


def test_the_stages_that_train_in_a_dtype_are_compared():
    config = resolved(load_run_config([*LLAMA, "--train.dtype", "bfloat16"]), native_bfloat16=True)
    found = memory_by_stage(config, config.model.config(), 8)
    assert list(found) == [1, 2, 3]
    assert [found[stage].state for stage in found] == sorted((m.state for m in found.values()), reverse=True)
    config = resolved(load_run_config(LLAMA))
    assert list(memory_by_stage(config, config.model.config(), 8)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("flags", "on_device", "host"),
    [
        (["--zero.stage", "2", "--zero.offload", "cpu"], 2 * P + 4 * P // 2, 16 * P // 2),
        (["--zero.stage", "3", "--zero.offload", "cpu"], 2 * P // 2, 20 * P // 2),
        (["--zero.stage", "3", "--zero.offload", "cpu", "--zero.offload_parameters", "cpu"], 0, 22 * P // 2),
        (["--zero.stage", "3", "--zero.offload_parameters", "cpu"], 16 * P // 2, 2 * P // 2),
    ],
)
def test_what_is_offloaded_lies_in_the_machines_memory(flags, on_device, host):
    own = need([*LLAMA, "--train.dtype", "bfloat16", "--parallel.context", "2", *flags])
    assert (own.on_device - own.activations, own.host) == (on_device, host)
    # What a trace counts on the device is the same, kind by kind.
    elsewhere = own.weights_offloaded + own.gradients_offloaded + own.optimizer_offloaded
    assert own.state - elsewhere == on_device


@pytest.mark.parametrize(
    ("flags", "disk", "memory"),
    [
        # Gradients stay in memory, and four sub-groups of a hundred million values pass through it.
        (["--zero.offload", "nvme"], 16 * P // 2, 2 * P // 2 + 4 * P // 2 + 16 * 100_000_000),
        (["--zero.offload", "nvme", "--zero.sub_group_size", "1000"], 16 * P // 2, 6 * P // 2 + 16 * 1000),
        (["--zero.offload", "nvme", "--zero.sub_group_size", "9_000_000_000"], 16 * P // 2, 22 * P // 2),
        (["--zero.offload_parameters", "nvme"], 2 * P // 2, 16 * P // 2),
    ],
)
def test_what_is_on_a_disk_takes_no_memory(flags, disk, memory):
    common = ["--train.dtype", "bfloat16", "--parallel.context", "2", "--zero.stage", "3", "--zero.nvme_path", "/x"]
    own = need([*LLAMA, *common, *flags])
    assert (own.disk, own.training - own.activations) == (disk, memory)
    said = refusal([*LLAMA, *common, *flags], 2, host=10)
    assert f"  swapped     {'-' + gib(disk):>12}" in said


def test_a_machine_without_room_for_what_is_offloaded_refuses():
    flags = [*LLAMA, "--train.dtype", "bfloat16", "--zero.stage", "3", "--zero.offload", "cpu"]
    # 20 bytes a parameter over eight ranks of this machine are 125.5 GiB.
    assert "free for offloading" in refusal(flags, 8, host=120, gpu=20)
    assert refusal(flags, 8, host=130, gpu=20) == ""


def test_experts_are_held_by_the_ranks_that_share_them():
    flags = ["--model.preset", "mixtral-8x7b", "--data.seq_len", "64", "--train.tokens_per_step", "512"]
    counts = count_parameters(load_run_config(flags).model.config())
    routed = counts["routed_experts"]
    one, four = (need([*flags, "--parallel.expert", str(n)], 8) for n in (1, 4))
    assert one.weights - four.weights == 4 * (routed - routed // 4)
    assert one.optimizer == four.optimizer, "spread over all ranks in any case"


def test_recomputation_saves_less_of_each_token():
    plain, recomputed, inputs = (need([*LLAMA, "--train.keep", word]) for word in ("all", "attention", "inputs"))
    assert inputs.activations == 2048 * 32 * 4096 * 4
    assert recomputed.activations == 2048 * 32 * 2 * 4096 * 4
    assert plain.activations == 2048 * 32 * (8 * 4096 + 2 * 11_008) * 4


@pytest.mark.parametrize("keep", ["all", "attention", "inputs"])
def test_what_is_kept_on_the_host_is_counted_there_but_for_the_last_layers(keep):
    flags = [*LLAMA, "--train.keep", keep]
    device, host = (need([*flags, "--train.store", store]) for store in ("device", "host"))
    assert host.activations == device.activations
    assert (device.host, host.host) == (0, device.activations * 31 // 32)
    assert device.on_device - host.on_device == host.host
    # Pinned memory of all the machine's ranks.
    assert "free for offloading" in refusal([*flags, "--train.store", "host"], 8, host=0.1, gpu=200)


def test_by_chunks_a_block_keeps_what_passes_between_its_parts_and_all_of_it_leaves_the_device():
    chunks = [*LLAMA, "--train.chunk_tokens", "512"]
    found = [need([*chunks, "--train.keep", keep]).activations for keep in ("all", "attention", "inputs")]
    assert found == [2048 * 32 * n * 4096 * 4 for n in (5, 2, 1)]
    device, host = need(chunks), need([*chunks, "--train.store", "host"])
    disk = need([*chunks, "--train.store", "disk", "--train.store_path", "x"])
    assert (device.host, host.host, disk.host) == (0, device.activations, 0)
    assert (device.kept_on_disk, host.kept_on_disk, disk.kept_on_disk) == (0, 0, device.activations)
    assert disk.training == device.training - device.activations


@pytest.mark.parametrize("config", [dense_config(), tiny_config(), tiny_config(dense_layers=(1,))], ids=str)
def test_every_kind_of_layer_has_its_share(config: ModelConfig):
    run = resolved(load_run_config(["--data.seq_len", "8", "--train.tokens_per_step", "8", "--parallel.context", "1"]))
    M, ffn = config.hidden_size, 2 * config.ffn_size
    experts = 2 * config.shared_ffn_size + 2 * config.experts_per_token * config.expert_ffn_size
    widths = sum(experts if config.has_experts(n) else ffn for n in range(2))
    attention = 4 * M + config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    assert memory_of_rank(run, config, 1).activations == 8 * (2 * attention + widths) * 4


def refusal(flags: list[str], world_size: int, *, host: float, gpu: float | None = None) -> str:
    config = resolved(load_run_config(flags))
    gpu_bytes = None if gpu is None else int(gpu * GIB)
    own = memory_of_rank(config, config.model.config(), world_size)
    return (
        why_too_large(
            config, config.model.config(), own, local_ranks=world_size, host_bytes=int(host * GIB), gpu_bytes=gpu_bytes
        )
        or ""
    )


def test_seven_billion_parameters_on_a_laptop_are_refused_with_the_arithmetic():
    """It died after 98 s of silence, killed by the kernel."""
    said = refusal([*LLAMA, "--train.dtype", "bfloat16"], 2, host=23)
    for words in ("6,738,415,616 parameters", "at least 82.0 GiB", "23.0 GiB", "stage=1"):
        assert words in said, said


def test_what_fits_is_not_refused():
    assert refusal([*LLAMA, "--train.dtype", "bfloat16"], 2, host=200) == ""
    assert refusal([*LLAMA, "--train.dtype", "bfloat16", "--zero.stage", "3"], 8, host=300, gpu=39) == ""


def test_a_gpu_holds_one_rank_and_the_machine_passes_every_ranks_weights():
    flags = [*LLAMA, "--train.dtype", "bfloat16", "--zero.stage", "3"]
    assert "10.0 GiB are free on its GPU" in refusal(flags, 8, host=300, gpu=10)
    said = refusal(flags, 8, host=10, gpu=39)
    assert "1.6 GiB, with 8 ranks on this machine and 10.0 GiB of host memory free" in said


def test_the_check_asks_the_machine_and_can_be_left_out(monkeypatch, caplog):
    monkeypatch.setattr(memory_estimate, "available_bytes", lambda with_growth=False: GIB)
    config = resolved(load_run_config(LLAMA))
    with pytest.raises(ConfigError, match="does not fit") as caught:
        check_memory(config, config.model.config(), 2, 2, torch.device("cpu"))
    assert "--zero.stage 3 and --train.keep attention would need" in str(caught.value)
    assert "--run.memory_check false" in str(caught.value)
    assert "--zero.offload" not in str(caught.value), "a CPU has nowhere else to go"
    monkeypatch.setattr(memory_estimate, "free_memory_bytes", lambda device: GIB)
    with pytest.raises(
        ConfigError, match=r"With --zero\.offload cpu and --train\.store host as well, it is .* on the GPU"
    ):
        check_memory(config, config.model.config(), 2, 2, torch.device("cuda"))
    assert len(str(caught.value).splitlines()) < SCREEN
    monkeypatch.setattr(
        memory_estimate, "available_bytes", lambda with_growth=False: 1000 * GIB if with_growth else GIB
    )
    with caplog.at_level("WARNING"):
        check_memory(config, config.model.config(), 2, 2, torch.device("cpu"))
    assert "may grow" in caplog.text
    off = resolved(load_run_config([*LLAMA, "--run.memory_check", "false"]))
    check_memory(off, off.model.config(), 2, 2, torch.device("cpu"))


@pytest.mark.parametrize(("kind", "bits"), [("nf4", 4.5), ("fp8", 8 + 32 / 128**2)])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_quantized_base_takes_its_bits(kind, bits, stage):
    adapters = [*LLAMA, "--zero.stage", str(stage), "--train.dtype", "bfloat16", "--parallel.context", "2"]
    adapters += ["--model.adapter.rank", "8"]
    plain, own = need(adapters), need([*adapters, "--model.adapter.quantize_base", kind])
    # Four attention matrices, and three of the FFN, in 32 layers.
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11_008)
    saved = matrices * (2 - bits / 8)
    assert plain.weights - own.weights == pytest.approx(saved / (2 if stage == 3 else 1), rel=1e-6)
    assert (own.gradients, own.optimizer, own.activations) == (plain.gradients, plain.optimizer, plain.activations)
