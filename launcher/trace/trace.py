"""``trace_run``: trace each kind of rank in a run, in its own process."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.config.config_sections import RunConfig
from launcher.config.resolved import ResolvedConfig
from launcher.plan.estimate import planned
from launcher.plan.hardware import Hardware, load_hardware
from launcher.plan.planned_world import RankKind, World, rank_kinds
from launcher.trace.live_bytes import ROOT
from launcher.trace.rank_trace import RankTrace
from launcher.trace.stand_in import torch_cuda_version
from longctx import errors
from longctx.errors import ConfigError, LongCtxError

_NO_CUDA = """\
plan --trace needs PyTorch's CUDA build, and {python} has the CPU build ({version}).
It needs neither a GPU nor a driver: tensors have shapes and no data. Create a separate environment:
  python3 -m venv cuda && cuda/bin/pip install torch==2.13.0 && cuda/bin/pip install {longctx}
  cuda/bin/python -m launcher plan --trace …
It takes 6 GB on disk. On a machine with GPUs, `make setup` has installed that build."""


@dataclass(frozen=True, kw_only=True)
class RunTrace:
    """One step in a run, traced on each kind of rank."""

    config: ResolvedConfig
    world: World
    document_tokens: int
    capability: tuple[int, int]
    kinds: list[RankKind]
    traces: list[RankTrace]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "config": dataclasses.asdict(self.config),
            "world": dataclasses.asdict(self.world),
            "document_tokens": self.document_tokens,
            "capability": list(self.capability),
            "ranks": [
                {"kind": kind.describe(), **trace.to_json()}
                for kind, trace in zip(self.kinds, self.traces, strict=True)
            ],
        }


def check_cuda_build() -> None:
    """Raise LongCtxError, with installation instructions, unless this PyTorch is built for CUDA."""
    if torch_cuda_version() is None:
        import torch

        longctx = "longctx-train"
        if (ROOT / "pyproject.toml").is_file():
            longctx = f"-e {shlex.quote(str(ROOT))}"
        raise LongCtxError(_NO_CUDA.format(python=sys.executable, version=torch.__version__, longctx=longctx))


def traced_config(
    requested: RunConfig, world: World, *, document_tokens: int, hardware: Hardware | None = None
) -> ResolvedConfig:
    """Resolve the config as on GPUs, independently of machine and data. Raise ConfigError if a run would reject it.

    ``train.chunk_tokens = "auto"`` depends on the memory in ``hardware``, by default an H100.
    """
    gpu = hardware or load_hardware("h100")
    config = planned(requested, world, gpu, document_tokens=document_tokens, device_type="cuda")
    # Compiled graphs cannot be traced; the report says so.
    config = config.changed({"train.compile": "off"})
    _check_store(config)
    if config.parallel.kernel == "auto":
        _check_scores(config)
        # flash-attn's kernels have the same shapes and buffers, and need not be installed here.
        config = config.changed({"parallel.kernel": "cuda_flash"})
    return config


def _check_store(config: ResolvedConfig) -> None:
    """Raise ConfigError if activations would be stored on a disk: a trace has no values."""
    if config.train.store == "disk":
        raise ConfigError(
            "plan --trace has no values for train.store=disk to write.\nTry --train.store host: device memory is the "
            "same, and the bytes counted on the host are the disk's."
        )


def trace_run(
    requested: RunConfig,
    world: World,
    *,
    document_tokens: int = 0,
    capability: tuple[int, int] = (9, 0),
    hardware: Hardware | None = None,
    progress: Callable[[RankKind], None] = lambda kind: None,
) -> RunTrace:
    """Trace one step on each kind of rank. Raise LongCtxError if it is impossible here or the run would be rejected."""
    check_cuda_build()
    config = traced_config(requested, world, document_tokens=document_tokens, hardware=hardware)
    kinds, traces = rank_kinds(config), []
    # Sequentially: a trace takes seconds, and memory for a hundred thousand tensors.
    for kind in kinds:
        progress(kind)
        request = {
            "config": dataclasses.asdict(config),
            "world": dataclasses.asdict(world),
            "rank": kind.rank,
            "document_tokens": document_tokens,
            "capability": list(capability),
        }
        traces.append(RankTrace.from_json(_ask_worker(request)))
    return RunTrace(
        config=config,
        world=world,
        document_tokens=document_tokens,
        capability=capability,
        kinds=kinds,
        traces=traces,
    )


def _check_scores(config: ResolvedConfig) -> None:
    """Raise ConfigError if scores need more than matmuls: they require FlexAttention, which needs data."""
    model, rule = config.model, None
    if model.attention_softcap:
        rule = f"model.attention_softcap={model.attention_softcap}"
    if model.position in ("alibi", "t5"):
        rule = f"model.position={model.position}"
    if rule is not None:
        raise ConfigError(
            f"{rule}: a GPU computes such scores with FlexAttention, which compiles kernels for real data and cannot "
            "be traced yet.\nTry --parallel.kernel blockwise, which has larger temporaries."
        )


def _ask_worker(request: dict[str, Any]) -> dict[str, Any]:
    # The worker imports the packages from the same place as this process, in any working folder.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        done = subprocess.run(
            [sys.executable, "-m", "launcher.trace.trace_worker", str(result)],
            input=json.dumps(request),
            text=True,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        if not result.exists():
            raise RuntimeError(f"rank {request['rank']}'s trace process died: {done.stderr.strip()[-2000:]}")
        answer = json.loads(result.read_text())
    if "trace" in answer:
        return answer["trace"]
    # Without a kind it is an internal error with its traceback, otherwise a user error.
    if not answer["kind"]:
        raise RuntimeError(f"the trace of rank {request['rank']} failed:\n{answer['error']}")
    raise getattr(errors, answer["kind"], ConfigError)(answer["error"])
