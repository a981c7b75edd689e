"""Which device a process computes on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from longctx.errors import ConfigError
from longctx.kernels.processor import has_native_bfloat16
from parallel.runtime.device import (
    choose_device,
    device_name,
    limit_matmul_caches,
    peak_memory_bytes,
    use_expandable_segments,
)


@pytest.fixture
def machine(monkeypatch):
    """A machine with so many GPUs and ranks; what would touch a real GPU is recorded."""

    def build(gpus: int, ranks: int, local_rank: int = 0) -> list[int]:
        chosen: list[int] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        monkeypatch.setenv("LOCAL_SIZE", str(ranks))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.setenv("DS_ACCELERATOR", "unset")
        return chosen

    return build


def test_every_rank_has_a_gpu_of_its_own(machine):
    chosen = machine(gpus=4, ranks=4, local_rank=3)
    assert choose_device("auto") == torch.device("cuda", 3)
    assert chosen == [3]
    assert os.environ["DS_ACCELERATOR"] == "cuda"


def test_gpus_add_up_parts_of_a_bfloat16_product_in_float32(machine):
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True  # PyTorch's default
    machine(gpus=1, ranks=1)
    choose_device("auto")
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


@pytest.mark.parametrize(("gpus", "ranks", "wish"), [(0, 2, "auto"), (4, 2, "cpu"), (0, 2, "cpu")])
def test_no_gpus_or_none_wanted_is_the_cpu(machine, gpus, ranks, wish):
    assert machine(gpus=gpus, ranks=ranks) == []
    assert choose_device(wish) == torch.device("cpu")
    assert os.environ["DS_ACCELERATOR"] == "cpu"


@pytest.mark.parametrize(("gpus", "said"), [(0, "sees 0 GPUs"), (1, r"slots=1 in the hostfile")])
def test_cuda_without_gpus_enough_is_refused(machine, gpus, said):
    machine(gpus=gpus, ranks=2)
    with pytest.raises(ConfigError, match=said):
        choose_device("cuda")


def test_gpus_that_would_stay_idle_are_refused_with_the_lines_to_type(machine, monkeypatch):
    """Further flags, and the scripts' own, are those of ``tests/launcher/test_idle_gpus.py``."""
    assert machine(gpus=2, ranks=3) == []
    monkeypatch.setattr(sys, "argv", ["x.py", "--parallel.context=3", "--run.device", "auto", "--data.train", "a b"])
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(ConfigError, match="3 ranks and has 2 GPUs") as refusal:
        choose_device("auto", context=3)
    typed = "    torchrun --standalone --nproc_per_node"
    assert str(refusal.value).splitlines()[2::2] == [
        f"{typed} 2 x.py --run.device auto --data.train 'a b' --parallel.context 1",
        f"{typed} 3 x.py --parallel.context=3 --data.train 'a b' --run.device cpu",
    ]
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(ConfigError, match=r"(?s)slots=2 for this machine in the hostfile.*add --device cpu$"):
        choose_device("auto", "--device", context=0)


def test_deepspeeds_own_variable_asks_for_the_cpu(machine, monkeypatch):
    machine(gpus=1, ranks=2)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert choose_device("auto") == torch.device("cpu")


def test_blocks_of_gpu_memory_grow_unless_the_user_says_otherwise():
    environment: dict[str, str] = {}
    use_expandable_segments(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        own = {name: "max_split_size_mb:512"}
        use_expandable_segments(own)
        assert own == {name: "max_split_size_mb:512"}


@pytest.mark.parametrize(("wish", "wanted"), [("auto", True), ("cpu", False)])
def test_they_do_before_a_gpu_is_touched(machine, monkeypatch, wish, wanted):
    machine(gpus=1, ranks=1)
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if "ALLOC_CONF" not in k})
    seen: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(seen.append("PYTORCH_ALLOC_CONF" in os.environ)))
    choose_device(wish)
    assert seen == [True] * wanted
    assert ("PYTORCH_ALLOC_CONF" in os.environ) == wanted


def test_a_cpu_keeps_few_products_unless_the_user_says_otherwise():
    environment = {"LRU_CACHE_CAPACITY": "1024"}
    limit_matmul_caches(environment)
    assert environment == {"LRU_CACHE_CAPACITY": "1024", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256"}


PRODUCTS = """
import psutil, torch
from parallel.runtime.device import choose_device

if CHOOSES:
    choose_device("cpu")
x, weight = torch.ones(1000, 128, dtype=torch.bfloat16), torch.ones(128, 128, dtype=torch.bfloat16)
before = psutil.Process().memory_info().rss
for rows in range(1, 1000):
    x[:rows] @ weight
print(psutil.Process().memory_info().rss - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not has_native_bfloat16(), reason="this processor multiplies bfloat16 as float32, which keeps none")
def test_memory_of_a_cpus_products_stops_growing():
    grown = []
    environment = {k: v for k, v in os.environ.items() if "CACHE_CAPACITY" not in k}
    # Code that goes is given back at once: gaps of the heap would be counted too, 0 to 100 MB by chance.
    environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    for chooses in (True, False):
        program = PRODUCTS.replace("CHOOSES", str(chooses))
        ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=120)
        assert ran.returncode == 0, ran.stderr.decode()
        grown.append(int(ran.stdout))
    # 256 sizes in place of 999.
    assert 3 * grown[0] < grown[1], grown


def test_the_cpu_tells_its_name_and_memory():
    assert device_name(torch.device("cpu")) == "cpu"
    assert peak_memory_bytes(torch.device("cpu")) > 10_000_000
