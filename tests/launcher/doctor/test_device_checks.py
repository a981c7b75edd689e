"""GPUs as nvidia-smi tells of them, and the attention kernel."""

from __future__ import annotations

import torch

from launcher.doctor.device_checks import check_devices, check_kernel, check_processor, describe_choice, parse_gpus
from longctx.kernels.attention.kernel_interface import KernelRequest
from longctx.kernels.attention.kernel_selection import KERNELS, KernelChoice
from longctx.kernels.processor import has_native_bfloat16

SAID = """\
NVIDIA H100 80GB HBM3, 81559, 4, 580.95.05
NVIDIA H100 80GB HBM3, 81559, 40960, 580.95.05
"""


def test_gpus_with_memory_driver_and_what_others_hold():
    summary, busy = check_devices(parse_gpus(SAID), 2)
    assert summary.verdict == "ok"
    assert summary.value.startswith("2 × NVIDIA H100 80GB HBM3 80 GiB, driver 580.95.05")
    assert busy.verdict == "warn"
    assert busy.value == "in use already: GPU 1: 40.0 GiB"


def test_lines_in_another_form_are_left_out():
    assert not parse_gpus("No devices were found\nNVIDIA H100, [N/A], 0, 580\n")


def test_a_driver_whose_gpus_pytorch_cannot_use(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (finding,) = check_devices(parse_gpus(SAID), 0)
    assert finding.verdict == "fail"
    assert torch.__version__ in finding.value
    assert "CUDA build" in finding.advice
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "unset it" in check_devices(parse_gpus(SAID), 0)[0].advice
    assert check_devices([], 0)[0].verdict == "ok", "no GPU is no fault"


def test_the_processor_says_how_it_multiplies_bfloat16():
    finding = check_processor()
    assert ("native bfloat16" in finding.value) == has_native_bfloat16()
    assert "core" in finding.value


def test_the_kernel_of_this_machine():
    finding = check_kernel("cpu")
    assert finding.verdict == "ok"
    assert finding.value.startswith("cpu_flash")
    assert "CUDA" not in finding.value, "a machine without GPU is not told of kernels for GPUs"


def test_a_faster_kernel_that_could_be_installed_is_a_warning_with_the_command():
    request = KernelRequest("cuda", torch.bfloat16, 128, 32, 8)
    reason = "the fastest kernel that supports it; not flash2: flash_attn is not installed"
    advice = "auto would prefer flash2 (pip install flash-attn)"
    finding = describe_choice(KernelChoice(KERNELS["cuda_flash"], reason, advice), request)
    assert finding.verdict == "warn"
    assert finding.value.endswith("not flash2: flash_attn is not installed")
    assert finding.advice == advice
