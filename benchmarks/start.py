"""From the command to the first step: wall seconds, compared with importing PyTorch and DeepSpeed alone.

    python -m benchmarks.start [--quick]

A small model on two ranks, by ``deepspeed`` and by ``torchrun``; the time ends when the first step's line is printed.
DeepSpeed's command imports both in two processes, one after the other, before a rank begins; torchrun imports PyTorch
once before. Each result is the minimum over rounds that take turns. ``--save`` writes
``benchmarks/results/KIND/start.json``; exit code 1 if a result is outside its bound.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from benchmarks.bounds import Bound, conclude, parse
from launcher.cluster.launch_commands import SCRIPT, torchrun

REPOSITORY = Path(__file__).resolve().parent.parent
IMPORTS = "import torch, deepspeed"
RANKS = 2
ONE_ROW = ("--train.tokens_per_step", 2048)
"""One small row per step, because the step's own time does not belong to the start."""
LIMITS = {"deepspeed": 3.2, "torchrun": 2.3, "longctx": 2.0}
"""Upper limits over the imports' time: 2.78, 1.89 and 1.7 measured, plus a sixth for noise."""


def deepspeed(*arguments: object, ranks: int) -> str:
    """Return the command that starts this many ranks on this machine with DeepSpeed's launcher."""
    return f"deepspeed --num_gpus {ranks} {SCRIPT} {shlex.join(map(str, arguments))}"


def ours(*arguments: object, ranks: int) -> str:
    """Return the same command with our own launcher."""
    return f"{sys.executable} -m launcher train --ranks {ranks} {shlex.join(map(str, arguments))}"


def make_shards(folder: Path) -> Path:
    """Build shards of this repository's own source, with the verbs that users type."""
    source, model, data = REPOSITORY / "longctx", folder / "tokenizer.model", folder / "data"
    verb = [sys.executable, "-m", "launcher"]
    train = ["tokenizer", "train", "--source", source, "--vocab-size", "1024", "--output", model]
    build = ["data", "build", "--source", source, "--tokenizer", model, "--output", data]
    for arguments in (train, build):
        subprocess.run([*verb, *map(str, arguments)], cwd=REPOSITORY, check=True, capture_output=True)
    return data


def seconds_of_imports() -> float:
    """Return the wall seconds of a Python that imports PyTorch and DeepSpeed, and exits."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, capture_output=True)
    return time.perf_counter() - started


@contextlib.contextmanager
def started(command: str, output: IO[str] | int) -> Iterator[subprocess.Popen[str]]:
    """Yield the running command, with its output in ``output``; end it by SIGTERM, with its ranks, if the ``with``
    block raises.
    """
    # Tools from this interpreter's environment, whether or not a shell has activated it.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "DS_ACCELERATOR": "cpu"}
    with subprocess.Popen(
        shlex.split(command), cwd=REPOSITORY, env=environment, text=True, stdout=output, stderr=subprocess.STDOUT
    ) as process:
        try:
            yield process
        except BaseException:
            process.terminate()
            process.wait()
            raise


def seconds_to_first_step(command: str) -> float:
    """Return wall seconds from the command to its first step's line; the training run then continues to its end."""
    begun, seconds, said = time.perf_counter(), None, []
    with started(command, subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if seconds is None and line.startswith("step 1/"):
                seconds = time.perf_counter() - begun
    if process.returncode or seconds is None:
        raise RuntimeError(f"{command}\nended with {process.returncode}:\n{''.join(said[-30:])}")
    return seconds


def measure(rounds: int) -> dict[str, Any]:
    """Return the minimum seconds for each launcher and for the imports."""
    with tempfile.TemporaryDirectory() as folder:
        data = make_shards(Path(folder))
        found: dict[str, list[float]] = {"imports": [], "deepspeed": [], "torchrun": [], "longctx": []}
        for number in range(rounds):
            found["imports"].append(seconds_of_imports())
            for launcher, line in (("deepspeed", deepspeed), ("torchrun", torchrun), ("longctx", ours)):
                output = Path(folder) / f"{launcher}-{number}"
                run = ["--data.train", data, "--run.output_dir", output, "--train.steps", 3, *ONE_ROW]
                command = line(*run, ranks=RANKS)
                found[launcher].append(seconds_to_first_step(command))
    seconds = {name: min(of) for name, of in found.items()}
    return {
        "ranks": RANKS,
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "all_seconds": {name: [round(value, 2) for value in of] for name, of in found.items()},
        "over_imports": {name: round(seconds[name] / seconds["imports"], 3) for name in LIMITS},
    }


def main() -> int:
    """Print and save the results; return 1 if one is outside its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = parse(parser, "one round")
    rounds = 5
    if options.quick:
        rounds = 1
    content = measure(rounds)
    print(f"{IMPORTS}: {content['seconds']['imports']} s")
    for name, ratio in content["over_imports"].items():
        print(f"first step by {name}: {content['seconds'][name]} s, {ratio} × the imports", flush=True)
    what = "seconds to the first step over those of the imports"
    bounds = [Bound(what, content["over_imports"][name], limit, name, again=()) for name, limit in LIMITS.items()]
    return conclude("start", content, bounds, options)


if __name__ == "__main__":
    sys.exit(main())
