"""How long a launcher waits for its ranks."""

from __future__ import annotations

import pytest

from launcher.training.stopping import SHUTDOWN_TIMEOUT, launcher_seconds


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, 30.0),
        ({"TORCHELASTIC_RUN_ID": "none"}, 30.0),
        ({"TORCHELASTIC_RUN_ID": "none", SHUTDOWN_TIMEOUT: "280"}, 280.0),
        # DeepSpeed's launcher does not look at it.
        ({SHUTDOWN_TIMEOUT: "280"}, 30.0),
    ],
)
def test_seconds_that_a_launcher_grants(environment, seconds):
    assert launcher_seconds(environment) == seconds
