"""How long a launcher waits for its ranks."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion

from launcher.training.stopping import SHUTDOWN_TIMEOUT, launcher_seconds

# torchrun does not look at it before torch 2.12.
READ = 280.0 if TorchVersion(torch.__version__) >= (2, 12) else 30.0


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, 30.0),
        ({"TORCHELASTIC_RUN_ID": "none"}, 30.0),
        ({"TORCHELASTIC_RUN_ID": "none", SHUTDOWN_TIMEOUT: "280"}, READ),
        # DeepSpeed's launcher does not look at it.
        ({SHUTDOWN_TIMEOUT: "280"}, 30.0),
    ],
)
def test_seconds_that_a_launcher_grants(environment, seconds):
    assert launcher_seconds(environment) == seconds
