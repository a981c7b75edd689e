"""Traces of tiny runs under PyTorch's CUDA build: ``python -m tests.launcher.trace.traces CASES`` prints one a line."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from launcher.config.load_config import load_run_config
from launcher.plan.planned_world import World
from launcher.trace.trace import traced_config
from launcher.trace.trace_step import trace_rank


def trace(case: dict[str, Any]) -> dict[str, Any]:
    """One case: flags, world, rank, length of the documents."""
    world = World(**case["world"])
    config = traced_config(load_run_config(case["flags"]), world, document_tokens=case.get("document_tokens", 0))
    if case.get("plant"):
        plant_wait()
    figures = trace_rank(config, world, case["rank"], document_tokens=case.get("document_tokens", 0))
    return figures.to_json()


def plant_wait() -> None:
    """Let the output head ask the device for a value, as a debugging print would."""
    from longctx.model.head import LMHead

    forward = LMHead.forward

    def asking(self, hidden_BtM, *args, **kwargs):
        hidden_BtM.sum().item()
        return forward(self, hidden_BtM, *args, **kwargs)

    LMHead.forward = asking


def in_child(case: dict[str, Any]) -> dict[str, Any]:
    """A trace in a process of its own: it is one rank for good. Forked, so that torch is imported once."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(sending, "w") as pipe:
            pipe.write(json.dumps(trace(case)))
        os._exit(0)
    os.close(sending)
    with os.fdopen(receiving) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text)


if __name__ == "__main__":
    results = [in_child(case) for case in json.loads(sys.argv[1])]
    sys.stdout.write(json.dumps(results) + "\n")
