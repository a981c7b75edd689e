"""What all tests of checkpoints have in common."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings of the launcher's logger, which another test may have cut off."""
    monkeypatch.setattr(logging.getLogger("launcher"), "propagate", True)
