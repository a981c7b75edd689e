"""Which device a process computes on."""

from __future__ import annotations

import os

import pytest
import torch

from longctx.errors import ConfigError
from parallel.runtime.device import choose_device, device_name, peak_memory_bytes, use_expandable_segments


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


@pytest.mark.parametrize(("gpus", "ranks", "wish"), [(0, 2, "auto"), (1, 2, "auto"), (4, 2, "cpu"), (0, 2, "cpu")])
def test_too_few_gpus_or_none_wanted_is_the_cpu(machine, gpus, ranks, wish):
    assert machine(gpus=gpus, ranks=ranks) == []
    assert choose_device(wish) == torch.device("cpu")
    assert os.environ["DS_ACCELERATOR"] == "cpu"


@pytest.mark.parametrize(("gpus", "said"), [(0, "sees 0 GPUs"), (1, r"slots=1 in the hostfile")])
def test_cuda_without_gpus_enough_is_refused(machine, gpus, said):
    machine(gpus=gpus, ranks=2)
    with pytest.raises(ConfigError, match=said):
        choose_device("cuda")


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


def test_the_cpu_tells_its_name_and_memory():
    assert device_name(torch.device("cpu")) == "cpu"
    assert peak_memory_bytes(torch.device("cpu")) > 10_000_000
