"""Tuning on conversations compared with TRL: the losses of twenty steps, and CPU seconds per step.

    python -m benchmarks.tuning --trl PYTHON [--quick]

PYTHON is the Python of an environment with trl, transformers, datasets and PyTorch, or ``$LONGCTX_TRL_PYTHON``. It
builds a Qwen3 with random weights, a tokenizer and a chat template, from which both sides start.

Losses: eight conversations, all of them in each step, float32, AdamW without decay, the loss of replies alone. TRL pads
them to one length. Ours gives each its own row, and then packs all into one row, split over 1, 2, 3 and 4 ranks.
Seconds: conversations of log-normal lengths, 1K to 16K tokens. TRL takes two at a time, padded, or packed in rows of
16K (``bfd``); ours packs them, with one thread on one rank like TRL. CPU seconds are those of complete processes:
training with twice the steps minus training with the steps.

Saved in ``benchmarks/results/KIND/tuning.json``; exit code 1 if a result is outside its bound.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bounds import Bound, conclude, parse
from launcher.cluster.launch_commands import torchrun
from launcher.metrics.record import read_metrics

PEER = Path(__file__).parent / "tuned" / "trl_side.py"
STEPS, LR = 20, 1e-3
SMALL = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
}
LARGE = SMALL | {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 64,
    "intermediate_size": 704,
}
SHORT_ROW, PACKED_ROW = 1024, 4104
"""The second one is split evenly by one to four ranks, with two token chunks each."""
LONG_ROW = 16_384
SHORTEST, LONGEST = 1000, 16_000
"""Tokens in the long conversations."""
CONVERSATIONS, QUICK_CONVERSATIONS = 16, 4
DEGREES = (1, 2, 3, 4)
CHARACTERS_A_TOKEN = 2.9
MOST_BESIDE_TRL, MOST_PACKED = 1e-5, 1e-6
MOST_OF_PADDED, MOST_OF_PACKED = 0.7, 1.0


@dataclass(frozen=True)
class Task:
    """A model, and conversations to tune it on."""

    folder: Path
    python: str

    @property
    def model(self) -> Path:
        """The Hugging Face folder."""
        return self.folder / "model"

    @property
    def conversations(self) -> Path:
        """JSON Lines of ``messages``."""
        return self.folder / "conversations.jsonl"

    def make(self, shape: dict[str, Any], lengths: Sequence[int]) -> None:
        """Build the model, conversations with about this many tokens, and their shards."""
        self.folder.mkdir()
        run([self.python, PEER, "make", self.model, json.dumps(shape)])
        write_conversations(self.conversations, lengths)
        data = ["--source", self.conversations, "--tokenizer", self.model, "--output", self.folder / "shards"]
        run([sys.executable, "-m", "launcher", "data", "build", *data, "--validation-fraction", "0"])

    def train_trl(self, steps: int, *, batch: int, accumulation: int, packing: bool, max_length: int) -> list[float]:
        """Return TRL's losses."""
        settings = {
            "model": str(self.model),
            "conversations": str(self.conversations),
            "output": str(self.folder / "trl"),
            "threads": 1,
            "steps": steps,
            "lr": LR,
            "batch": batch,
            "accumulation": accumulation,
            "packing": packing,
            "max_length": max_length,
        }
        said = run([self.python, PEER, "train", json.dumps(settings)])
        return json.loads(said.splitlines()[-1])["losses"]

    def train_ours(self, steps: int, ranks: int, changed: dict[str, Any]) -> list[float]:
        """Return our losses."""
        settings = {
            "run.hostfile": "none",
            "run.start_from": self.model,
            "data.train": self.folder / "shards",
            "train.steps": steps,
            "train.lr": LR,
            "train.warmup_steps": 0,
            "train.final_lr_ratio": 1,
            "train.weight_decay": 0,
            "train.dtype": "float32",
            "parallel.context": ranks,
            "checkpoint.every_steps": 0,
            "validation.rows": 0,
            **changed,
        }
        with tempfile.TemporaryDirectory(dir=self.folder) as output:
            settings["run.output_dir"] = output
            words = [str(word) for key, value in settings.items() for word in (f"--{key}", value)]
            run(torchrun(*words, ranks=ranks).split())
            return [record["loss"] for record in read_metrics(Path(output)) if record["kind"] == "train"]


def run(command: Sequence[object]) -> str:
    """Return a command's output; RuntimeError with its last lines if it fails."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    found = subprocess.run([str(word) for word in command], env=environment, capture_output=True, text=True)
    if found.returncode:
        raise RuntimeError(f"{command}\n{found.stdout[-2000:]}\n{found.stderr[-2000:]}")
    return found.stdout


def write_conversations(path: Path, lengths: Sequence[int]) -> None:
    """Write conversations with about these many tokens each: code, in turns of random lengths."""
    draw = random.Random(0)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "\n".join(file.read_text(errors="ignore") for file in files)
    with path.open("w") as file:
        for length in lengths:
            messages: list[dict[str, str]] = []
            left = int(length * CHARACTERS_A_TOKEN)
            while left > 0:
                size = min(left, draw.randint(left // 4 + 50, left // 2 + 100))
                begin = draw.randrange(len(text) - size)
                role = ("user", "assistant")[len(messages) % 2]
                messages.append({"role": role, "content": text[begin : begin + size]})
                left -= size
            if len(messages) % 2:
                messages.append({"role": "assistant", "content": "Done."})
            file.write(json.dumps({"messages": messages}) + "\n")


def losses(folder: Path, python: str) -> tuple[dict[str, Any], list[Bound]]:
    """Return the losses of all variants, and their bounds."""
    task = Task(folder / "short", python)
    task.make(SMALL, [120, 480, 250, 60, 700, 330, 200, 450])
    theirs = task.train_trl(STEPS, batch=8, accumulation=1, packing=False, max_length=SHORT_ROW)
    alone = {"data.packing": "one_document", "data.seq_len": SHORT_ROW, "train.tokens_per_step": 8 * SHORT_ROW}
    unpacked = task.train_ours(STEPS, 1, alone)
    packed = {
        degree: task.train_ours(STEPS, degree, {"data.seq_len": PACKED_ROW, "train.tokens_per_step": PACKED_ROW})
        for degree in DEGREES
    }
    beside = _largest(unpacked, theirs)
    print(f"{'':28}first loss  last loss  largest difference")
    print(f"{'TRL, padded':28}{theirs[0]:10.6f} {theirs[-1]:10.6f}")
    print(f"{'ours, a row each':28}{unpacked[0]:10.6f} {unpacked[-1]:10.6f}  {beside:.1e} from TRL")
    bounds = [Bound(what="largest difference of losses from TRL's, unpacked", figure=beside, limit=MOST_BESIDE_TRL)]
    differences = {}
    for degree, found in packed.items():
        differences[degree] = _largest(found, unpacked)
        name = f"ours, packed, context {degree}"
        print(f"{name:28}{found[0]:10.6f} {found[-1]:10.6f}  {differences[degree]:.1e} from a row each")
        bounds.append(
            Bound(
                what="largest difference of packed losses from unpacked ones",
                case=f"context {degree}",
                figure=differences[degree],
                limit=MOST_PACKED,
            )
        )
    return {"trl": theirs, "unpacked": unpacked, "beside_trl": beside, "packed": differences}, bounds


def seconds(folder: Path, python: str, count: int) -> tuple[dict[str, Any], list[Bound]]:
    """Return CPU seconds of a pass over the long conversations, and their bounds."""
    draws = np.random.default_rng(0).lognormal(np.log(4000), 0.8, 4 * count)
    lengths = [int(length) for length in draws if SHORTEST <= length <= LONGEST][:count]
    task = Task(folder / "long", python)
    task.make(LARGE, lengths)
    rows = _rows(task)
    pairs = {"batch": 2, "accumulation": count // 2, "packing": False, "max_length": LONGEST + 1000}
    bins = {"batch": 1, "accumulation": rows, "packing": True, "max_length": LONG_ROW}
    ours = {"data.seq_len": LONG_ROW, "train.tokens_per_step": rows * LONG_ROW}
    found = {
        "padded": _cpu_seconds(lambda steps: task.train_trl(steps, **pairs)),
        "packed": _cpu_seconds(lambda steps: task.train_trl(steps, **bins)),
        "ours": _cpu_seconds(lambda steps: task.train_ours(steps, 1, ours)),
    }
    tokens = sum(lengths)
    print(f"\nCPU seconds of a step: {count} conversations, some {tokens:,} tokens, {rows} rows of {LONG_ROW:,}")
    for name, figure in found.items():
        print(f"  {name:8}{figure:8.1f}")
    bounds = [
        Bound(what="CPU seconds over TRL's padded", figure=found["ours"] / found["padded"], limit=MOST_OF_PADDED),
        Bound(what="CPU seconds over TRL's packed", figure=found["ours"] / found["packed"], limit=MOST_OF_PACKED),
    ]
    return {"lengths": lengths, "rows": rows, "cpu_seconds": found}, bounds


def _rows(task: Task) -> int:
    """Return the number of rows into which best fit packs the conversations."""
    said = run(
        [sys.executable, "-m", "launcher", "data", "inspect", task.folder / "shards", "--seq-len", LONG_ROW, "--json"]
    )
    return int(json.loads(said)["packing"]["rows"])


def _cpu_seconds(train: Any) -> float:
    """Return a step's processor seconds: training with two steps minus training with one."""
    used = []
    for steps in (1, 2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        train(steps)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return used[1] - used[0]


def _largest(found: Sequence[float], other: Sequence[float]) -> float:
    assert len(found) == len(other) == STEPS
    return float(np.abs(np.array(found) - np.array(other)).max())


def main() -> int:
    """Measure both, print and save the tables; return 1 if a result is outside its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", default=os.environ.get("LONGCTX_TRL_PYTHON"), metavar="PYTHON", help="Python with trl")
    options = parse(parser, quick="four long conversations")
    if not options.trl:
        parser.error("--trl PYTHON (or $LONGCTX_TRL_PYTHON) names the Python of an environment with trl.")
    versions = run([options.trl, "-c", "import trl, transformers; print(trl.__version__, transformers.__version__)"])
    with tempfile.TemporaryDirectory() as name:
        short, bounds = losses(Path(name), options.trl)
        count = QUICK_CONVERSATIONS if options.quick else CONVERSATIONS
        long, more = seconds(Path(name), options.trl, count)
    trl, transformers = versions.split()
    content = {"trl": trl, "transformers": transformers, "losses": short, "seconds": long}
    return conclude("tuning", content, [*bounds, *more], options)


if __name__ == "__main__":
    sys.exit(main())
