"""A call of NCCL, with gloo in its place: what is read, and what is said when it fails or hangs."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from launcher.doctor.network import nccl_call
from launcher.doctor.network.nccl_call import NcclCall
from tests.helpers import run_distributed
from tests.launcher.doctor.network.test_nccl import ADAPTERS

CPU = torch.device("cpu")


def nccl(world_size: int) -> NcclCall:
    """A call on a CPU tensor's device: the group of the test is there already."""
    call = NcclCall(dist.PrefixStore("nccl", _get_default_store()), dist.get_rank(), world_size, 0)
    call._device = CPU
    return call


def speaking(*args, **options) -> None:
    """NCCL that starts, and writes its log where it was told to."""
    assert os.environ["NCCL_DEBUG"] == "INFO"
    Path(os.environ["NCCL_DEBUG_FILE"]).write_text(ADAPTERS)


def stand_in(init=speaking):
    return (
        patch.object(dist, "init_process_group", init),
        patch.object(torch.cuda, "set_device", lambda device: None),
        patch.object(torch.cuda, "synchronize", lambda device: None),
    )


def check_asked(world_size: int):
    a, b, c = stand_in()
    with a, b, c:
        told = nccl(world_size).run()
    assert told["problem"] == ""
    assert told["network"]["transport"] == "IB"
    assert told["network"]["was_asked"] is True


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_it_says(world_size):
    run_distributed(check_asked, world_size, world_size)


def check_failure():
    def fail(*args, **options):
        speaking()
        raise RuntimeError("NCCL error: Duplicate GPU detected\nstack")

    a, b, c = stand_in(fail)
    with a, b, c:
        told = nccl(1).run()
    assert told["problem"] == "NCCL error: Duplicate GPU detected"
    assert told["network"]["devices"] == ("mlx5_10:1/RoCE", "mlx5_11:1/IB"), "what it said before is kept"
    # Without a GPU PyTorch itself says so.
    told = nccl(1).run()
    assert told["problem"]
    assert told["network"] is None


def test_why_nccl_does_not_start():
    run_distributed(check_failure, 1)


def check_hang():
    release = threading.Event()

    def hang(*args, **options):
        release.wait(30)

    a, b, c = stand_in(hang)
    with a, b, c, patch.object(nccl_call, "START_SECONDS", 0.3):
        told = nccl(1).run()
        release.set()
    assert told["problem"].startswith("NCCL hangs: its ranks do not find each other")


def test_nccl_that_hangs_is_not_waited_for():
    run_distributed(check_hang, 1)
