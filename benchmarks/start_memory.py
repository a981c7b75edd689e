"""Memory and time to start a training run with 1.3 billion parameters on two ranks, by ZeRO stage and origin.

    python -m benchmarks.start_memory [--quick] [--only TEXT] [--before FILE]

Each rank is a process that runs the code before a training run's first step. Its peak is that of its own memory
(``RssAnon`` in /proc, without file pages, which the system may reclaim), sampled every few milliseconds, beyond the
imports' memory. A rank's shard is the memory it keeps during training: weights in the training dtype, masters and both
moments, without gradients. A new training run creates its moments in the first step, so its peak is lower. ``--save``
writes ``benchmarks/results/KIND/start_memory.json``; exit code 1 if a peak exceeds twice the shard plus 1 GiB.
``--before`` adds the rows in a file that another version wrote with ``--rows`` to the table.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.bounds import Bound, conclude, parse
from benchmarks.ranks import run_ranks
from benchmarks.start import make_shards
from longctx.conversion.checkpoint_writer import save_master_weights
from longctx.conversion.tensor_layouts import parameter_shapes
from longctx.kernels.memory import available_bytes

if TYPE_CHECKING:
    from launcher.config.config_sections import RunConfig

RANKS = 2
GIB = 1 << 30
PRELOAD = ("launcher.training.setup", "launcher.checkpoint.background_saver", "deepspeed.module_inject")
MODELS: dict[str, dict[str, Any]] = {
    "dense": {
        "model.vocab_size": 32_000,
        "model.hidden_size": 2048,
        "model.num_heads": 16,
        "model.num_kv_heads": 16,
        "model.head_dim": 128,
        "model.ffn_size": 5504,
    },
    "experts": {
        "model.vocab_size": 32_000,
        "model.hidden_size": 1024,
        "model.num_heads": 16,
        "model.num_kv_heads": 4,
        "model.head_dim": 64,
        "model.ffn_size": 2048,
        "model.num_experts": 16,
        "model.experts_per_token": 2,
        "model.expert_ffn_size": 2048,
        "parallel.expert": RANKS,
    },
}
LAYERS = {"dense": {1.3: 24, 0.7: 12, 0.3: 5}, "experts": {1.3: 12, 0.3: 2}}
"""Layers by billions of parameters."""


@dataclass(frozen=True)
class Case:
    """One start."""

    model: str
    origin: str
    """``new``, ``weights`` (from a checkpoint, masters alone) or ``resumed`` (masters and moments)."""
    stage: int
    billions: float = 1.3

    @property
    def dtype(self) -> str:
        """The dtype: stage 0 trains only in float32."""
        return "float32" if self.stage == 0 else "bfloat16"

    @property
    def text(self) -> str:
        """The case as text."""
        return f"{self.model}, {self.billions} billion, {self.origin}, ZeRO {self.stage}, {self.dtype}"

    def settings(self) -> dict[str, Any]:
        """Return config keys that differ from the defaults."""
        layers = LAYERS[self.model][self.billions]
        return {**MODELS[self.model], "model.num_layers": layers, "zero.stage": self.stage, "train.dtype": self.dtype}


CASES = [
    *(Case("dense", "new", stage) for stage in (0, 2, 3)),
    # In stage 1 and bfloat16 DeepSpeed allocates all float32 gradients at the start: 10 GB per rank for the larger
    # model.
    Case("dense", "new", 1, 0.7),
    *(Case("experts", "new", stage) for stage in range(4)),
    *(Case("dense", "new", stage, 0.3) for stage in range(4)),
    *(Case("dense", "weights", stage) for stage in (2, 3)),
    *(Case(model, "resumed", stage, 0.3) for model in MODELS for stage in range(4)),
]


class PeakMemory:
    """This process's peak memory of its own within the ``with`` block, in bytes."""

    def __enter__(self) -> PeakMemory:
        self.before = self.peak = _own_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def rise(self) -> int:
        """Increase over the memory before."""
        return self.peak - self.before

    def _watch(self) -> None:
        while not self._done.wait(0.003):
            self.peak = max(self.peak, _own_bytes())


def _own_bytes() -> int:
    """Return resident memory that is backed by no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def load_config(data: Path, output: Path, settings: dict[str, Any]) -> RunConfig:
    """Return a training run's config with these settings."""
    from launcher.config.load_config import load_run_config

    keys = {
        "data.train": data,
        "run.output_dir": output,
        "run.hostfile": "none",
        "run.memory_check": "false",
        "model.preset": "none",
        "model.tie_embeddings": "true",
        "data.seq_len": 256,
        "train.tokens_per_step": 256 * RANKS,
        "train.steps": 2,
        "train.lr": 1e-4,
        # As on processors with such instructions, on any machine; stage 0 has no bfloat16.
        "train.dtype": "bfloat16" if settings.get("zero.stage", 1) else "float32",
        "train.products": "native",
        "validation.rows": 0,
        **settings,
    }
    return load_run_config([word for key, value in keys.items() for word in (f"--{key}", str(value))])


def start(data: Path, output: Path, settings: dict[str, Any], origin: dict[str, Any]) -> dict[str, float]:
    """Build a training run as ``launcher/pretrain.py`` does; return its cost on this rank."""
    from launcher.plan.memory_estimate import memory_of_rank
    from launcher.training.setup import build_run

    logging.disable(logging.CRITICAL)
    config = load_config(data, output, settings | origin)
    began, cpu_began = time.perf_counter(), time.process_time()
    with PeakMemory() as memory, contextlib.redirect_stdout(io.StringIO()):
        run = build_run(config, torch.device("cpu"))
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    need = memory_of_rank(run.config, run.model, RANKS)
    share = need.weights + need.optimizer
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak": memory.rise, "share": share}


def save(data: Path, output: Path, settings: dict[str, Any]) -> None:
    """Write a checkpoint with moments, from a training run without steps."""
    from launcher.checkpoint.background_saver import Saver
    from launcher.training.setup import build_run

    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()):
        run = build_run(load_config(data, output, settings), torch.device("cpu"))
        output.mkdir(parents=True, exist_ok=True)
        saver = Saver(output, run.engine, model=run.model, tokenizer_files=run.tokenizer_files)
        saver.save(step=0, training={"step": 0}, wait=True)


def origin_of(case: Case, data: Path, folder: Path) -> dict[str, Any]:
    """Return the settings for the training run's origin; its checkpoint is written here, outside the measurement."""
    if case.origin == "new":
        return {}
    written = folder / f"checkpoint-{case.model}-{case.billions}"
    if case.origin == "weights":
        if not written.exists():
            model = load_config(data, folder, case.settings()).model.config()
            zeros = ((name, torch.zeros(1).expand(shape)) for name, shape in parameter_shapes(model).items())
            save_master_weights(model, zeros, written, dtype=torch.bfloat16, training={})
        return {"run.start_from": written}
    checkpoint = written / "checkpoints" / "step_000000"
    if not checkpoint.exists():
        run_ranks(save, RANKS, data, written, {**case.settings(), "zero.stage": 3}, preload=PRELOAD)
    return {"run.resume": checkpoint}


def is_room(case: Case) -> bool:
    """Return whether this machine has enough memory: otherwise other programs might be killed too."""
    model = load_config(Path(), Path(), case.settings()).model.config()
    # Bytes per parameter and rank: without moments, and with them and DeepSpeed's temporary copies.
    a_parameter = 6
    if case.billions < 1:
        a_parameter = 12
    needed = a_parameter * RANKS * sum(torch.Size(shape).numel() for shape in parameter_shapes(model).values())
    return needed < available_bytes()


def measure(cases: list[Case], kept: Path | None) -> list[dict[str, Any]]:
    """Measure a row per case: the slowest rank, and the one with the highest peak; append rows to the file ``kept``.

    Cases that exceed this machine's memory are left out.
    """
    rows = []
    with tempfile.TemporaryDirectory(prefix="longctx-start-") as name:
        folder = Path(name)
        data = make_shards(folder)
        for number, case in enumerate(cases):
            if not is_room(case):
                print(f"{case.text}: left out, {available_bytes() / GIB:.1f} GiB are free here", flush=True)
                continue
            origin = origin_of(case, data, folder)
            results = run_ranks(start, RANKS, data, folder / str(number), case.settings(), origin, preload=PRELOAD)
            row = {
                **asdict(case),
                "dtype": case.dtype,
                **{key: round(max(r[key] for r in results), 1) for key in ("seconds", "cpu_seconds")},
                **{key: round(max(r[key] for r in results) / GIB, 2) for key in ("peak", "share")},
            }
            rows.append(row)
            if kept is not None:
                kept.write_text(json.dumps(rows))
            figures = f"{row['seconds']} s, {row['cpu_seconds']} s of CPU, peak {row['peak']} GiB"
            print(f"{case.text}: {figures}, shard {row['share']} GiB", flush=True)
    return rows


def main() -> int:
    """Print and save the results; return 1 if a peak exceeds its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose words have this text")
    parser.add_argument("--rows", type=Path, help="write the rows to this JSON file")
    parser.add_argument("--before", type=Path, action="append", default=[], help="rows of another version to keep")
    parser.add_argument("--join", type=Path, action="append", default=[], help="rows of this version measured before")
    options = parse(parser, "models of 0.3 billion parameters")
    cases = [case for case in CASES if options.only in case.text and (case.billions < 0.5 or not options.quick)]
    joined = [row for path in options.join for row in json.loads(path.read_text())]
    rows = joined or measure(cases, options.rows)
    before = [row for path in options.before for row in json.loads(path.read_text())]
    bounds = [
        Bound(
            "peak GiB of a rank while it starts, beside twice its share and 1 GiB",
            row["peak"],
            round(2 * row["share"] + 1, 2),
            f"{row['model']}, {row['billions']} billion, {row['origin']}, ZeRO {row['stage']}",
        )
        for row in rows
    ]
    content = {"ranks": RANKS, "rows": rows, "before": before}
    return conclude("start_memory", content, bounds, options, whole=len(rows) == len(CASES))


if __name__ == "__main__":
    sys.exit(main())
