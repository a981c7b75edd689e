"""DeepSpeed's Muon optimiser: imported by every ZeRO stage, used by none of ours."""

from __future__ import annotations

import os

_SWITCH = "TORCHDYNAMO_DISABLE"


def import_muon_uncompiled() -> None:
    """Import Muon with torch.compile switched off, so that it does not bring inductor: seconds of every rank.

    Each ZeRO stage imports the module to ask whether the optimiser is a Muon, and importing it hands three functions
    to torch.compile, which then loads its whole compiler. Ours is an AdamW, so nothing ever calls them.
    """
    before = os.environ.get(_SWITCH)
    # PyTorch's own switch, for this import alone: whatever else the process compiles is compiled.
    os.environ[_SWITCH] = "1"
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        del os.environ[_SWITCH]
        if before is not None:
            os.environ[_SWITCH] = before
