"""Tiny runs: their flags, and the deepspeed command that starts them as a user would."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from launcher.config.config_sections import RunConfig
from launcher.config.load_config import load_run_config
from launcher.config.resolve import Data, TargetMachine, resolve
from launcher.config.resolved import ResolvedConfig
from tests.helpers import REPOSITORY
from tests.longctx.families.hub_configs import HUB

STEPS = 8
"""Steps of a tiny run, checkpoints after each second one."""

TINY_MODEL = {
    "model.preset": "quickstart",
    "model.vocab_size": 512,
    "model.hidden_size": 32,
    "model.num_layers": 2,
    "model.num_heads": 2,
    "model.head_dim": 16,
    "model.num_experts": 4,
    "model.expert_ffn_size": 16,
    "model.shared_ffn_size": 16,
    # of the preset, what is for long runs alone
    "model.tie_embeddings": True,
    "model.embedding_std": 0.0,
    "model.balance_loss_weight": 0.01,
    "model.router_jitter": 0.0,
}
TINY_RUN = {
    "data.seq_len": 256,
    "train.steps": STEPS,
    "train.tokens_per_step": 512,
    "train.dtype": "float32",
    "train.warmup_steps": 2,
    "train.optimizer": "adamw",
    "train.lr": 5e-3,
    "parallel.context": 2,
    "checkpoint.every_steps": 2,
    "checkpoint.keep_last": 0,
    "validation.every_steps": 4,
    "validation.rows": 2,
    "run.timeout_seconds": 40.0,
}
SCREEN = 25
"""Lines an error may take."""


def flags(shards: Path, output: Path, changed: Mapping[str, Any] | None = None) -> list[str]:
    """Command-line flags of a tiny run; ``changed`` has further or other keys."""
    keys = {"data.train": shards, "run.output_dir": output, **TINY_MODEL, **TINY_RUN, **(changed or {})}
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


def tiny_config(shards: Path, output: Path, changed: Mapping[str, Any] | None = None) -> RunConfig:
    """The same as a config, for workers that no launcher started."""
    return load_run_config(flags(shards, output, {"run.hostfile": "none", **(changed or {})}))


def resolved(
    config: RunConfig,
    *,
    native_bfloat16: bool = False,
    device_type: str = "cpu",
    ranks: int = 1,
    fits: Callable[[ResolvedConfig], bool] = lambda config: True,
) -> ResolvedConfig:
    """What a config comes to on such a machine, with documents of any length."""
    machine = TargetMachine(ranks=ranks, device_type=device_type, native_bfloat16=native_bfloat16, fits=fits)
    return resolve(config, machine, Data(is_packed=True))


def recipe_flags(recipe: Path) -> list[str]:
    """Flags that load a recipe. The weights that it starts from seem to be there: their config.json is."""
    named = ["--config", str(recipe)]
    if tomllib.loads(recipe.read_text())["run"].get("start_from", "no") == "no":
        return named
    return [*named, "--run.start_from", str(published(STARTS[recipe.stem]))]


STARTS = {
    "extend-yarn": "Llama-2-7b-hf",
    "mistral-7b-32k": "Mistral-7B-v0.1",
    "qwen3-8b-256k-yarn": "Qwen3-8B",
    "qwen3-30b-a3b-128k": "Qwen3-30B-A3B",
    "sft-qwen3-8b-128k": "Qwen3-8B",
    "sft-llama-3.1-8b-256k": "Llama-3.1-8B",
    "sft-recall": "recall",
    "lora-llama-3.1-8b-256k": "Llama-3.1-8B",
    "lora-gpt-oss-20b-512k": "gpt-oss-20b",
    "lora-recall": "recall",
    "dpo-qwen3-8b-64k": "Qwen3-8B",
    "dpo-recall": "recall",
}
"""Model that a recipe starts from: a published one, or ours by ``make demo-chat``."""
STARTED = HUB | {
    "recall": HUB["Qwen3-8B"]
    | {"vocab_size": 1152, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 32}
    | {"num_key_value_heads": 8, "intermediate_size": 128, "max_position_embeddings": 1024}
    | {"rope_theta": 4000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 4000.0}}
}
"""The config.json of each."""


@cache
def published(name: str) -> Path:
    """A Hugging Face folder of a published model without its weights, until this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="longctx-published-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.json").write_text(json.dumps(STARTED[name]))
    return folder


def tiny_start(shards: Path, output: Path, changed: Mapping[str, Any]) -> RunConfig:
    """A tiny run that takes its model from ``run.start_from``."""
    keys = {"data.train": shards, "run.output_dir": output, **TINY_RUN, "run.hostfile": "none", **changed}
    return load_run_config([word for key, value in keys.items() for word in (f"--{key}", str(value))])


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    text: str
    """What it wrote to standard output and standard error, as it came."""
    seconds: float
    orphans: list[str]
    """Command lines of processes it left behind."""
    folder: Path
    """The run's output folder."""

    def ours(self) -> list[str]:
        """The lines that are not the deepspeed launcher's own."""
        return [line for line in self.text.splitlines() if line.strip() and not _is_launchers(line)]

    def check_one_screen(self, code: int, *said: str) -> None:
        """Ended with this exit code and one screen that holds every one of ``said`` once, without a traceback."""
        assert self.code == code, self.text
        assert "Traceback" not in self.text, self.text
        assert len(self.ours()) < SCREEN, self.text
        for words in said:
            assert self.text.count(words) == 1, f"{words!r} is said {self.text.count(words)} times:\n{self.text}"
        assert not self.orphans, self.orphans


def _is_launchers(line: str) -> bool:
    return "[INFO]" in line or "[WARNING]" in line or "[ERROR] [launch.py" in line


def pretrain(arguments: Sequence[str], *, timeout: float = 90.0, **options: Any) -> Ended:
    """``deepspeed … launcher/pretrain.py`` with these arguments on two ranks of this machine, to its end."""
    return Launch(arguments, **options).wait(timeout)


class Launch:
    """A started deepspeed command: watch it, kill its ranks, wait for its end."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        hostfile: str | Path | None = None,
        environment: Mapping[str, str] | None = None,
        master_address: str = "127.0.0.1",
        script: str = "launcher/pretrain.py",
        starter: Sequence[str] = (),
    ) -> None:
        """``hostfile`` starts the ranks that it names, on any machine; without one there are two ranks here.

        ``launch_words`` are the words of another launcher, up to the script.
        """
        self.arguments = list(arguments)
        launcher = ["--num_gpus", "2"]
        if hostfile is not None:
            launcher = ["--hostfile", str(hostfile), "--no_ssh_check", "--master_addr", master_address]
        command = [str(Path(sys.executable).parent / "deepspeed"), *launcher, "--master_port", str(free_port())]
        if starter:
            command = list(starter)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            [*command, script, *self.arguments],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PATH": path, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def folder(self) -> Path:
        """The run's output folder."""
        return Path(self.arguments[self.arguments.index("--run.output_dir") + 1])

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes that run the script, by rank."""
        found = {}
        for process in psutil.Process(self._process.pid).children(recursive=True):
            # One that has just ended has no command line any more, and one that has just begun no environment yet.
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, KeyError):
                words = process.cmdline()
                if "launcher/pretrain.py" in words and "deepspeed.launcher.launch" not in words:
                    found[int(process.environ()["RANK"])] = process
        return found

    def runner(self) -> psutil.Process:
        """The process that a user starts."""
        return psutil.Process(self._process.pid)

    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def launchers(self) -> list[psutil.Process]:
        """Those that it starts on this machine, each with ranks of its own."""
        return [process for process in self.family() if "deepspeed.launcher.launch" in _words_of(process)]

    def family(self) -> list[psutil.Process]:
        """All processes of the run, also those that a server started for another host."""
        mark, found = str(self.folder), [self.runner()]
        for process in psutil.process_iter():
            if process.pid != self._process.pid and mark in _words_of(process):
                found.append(process)
        return found

    def wait_until(self, condition: Callable[[], bool], timeout: float = 60.0) -> None:
        """Return once the condition holds; the launch must be alive until then."""
        deadline = time.monotonic() + timeout
        while not condition():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"it did not come to that:\n{self.wait(1).text}")
            time.sleep(0.01)

    def wait(self, timeout: float = 90.0) -> Ended:
        """Wait for the end; a launch that takes longer is killed with all it started, and fails the test."""
        family = psutil.Process(self._process.pid).children(recursive=True)
        try:
            text, _ = self._process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            for process in [*psutil.Process(self._process.pid).children(recursive=True), self._process]:
                process.send_signal(signal.SIGKILL)
            raise AssertionError(f"still running after {timeout} s:\n{self._process.communicate()[0]}") from None
        seconds = time.monotonic() - self._started
        return Ended(self._process.returncode, text, seconds, _alive(family, str(self.folder)), self.folder)


def supervised(
    arguments: Sequence[str],
    starter: Sequence[str] = ("--num_gpus", "2"),
    *,
    wait_seconds: int = 1,
    environment: Mapping[str, str] | None = None,
) -> Launch:
    """The deepspeed command with the words of ``launch_words`` under ``longctx run``."""
    command = [str(Path(sys.executable).parent / "deepspeed"), *starter, "--master_port", str(free_port())]
    run = [sys.executable, "-m", "launcher", "run", "--wait-seconds", str(wait_seconds), "--"]
    return Launch(arguments, starter=[*run, *command], environment=environment)


def _words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _alive(family: list[psutil.Process], mark: str) -> list[str]:
    """Command lines of those that still run, and of any other process that works on the same output folder."""
    _, alive = psutil.wait_procs(family, timeout=3)
    for process in psutil.process_iter(["cmdline"]):
        if mark in (process.info["cmdline"] or []) and process not in alive:
            alive.append(process)
    return [" ".join(process.cmdline()) for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def path_without_ssh(folder: Path) -> str:
    """A PATH on which every ssh and pdsh fails, as where no server answers, and says so in ``folder / "
    ""stop_request"``."""
    programs = folder / "programs"
    programs.mkdir()
    for name in ("ssh", "pdsh"):
        (programs / name).write_text(f'#!/bin/sh\necho "$0 $@" >> {folder}/asked\nexit 255\n')
        (programs / name).chmod(0o755)
    return f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"


def free_port() -> int:
    """A port that nothing listens on now, and that the system gives to nobody before the ranks use it.

    One that the system chooses lies where outgoing connections get theirs, of which other tests make many.
    """
    while True:
        port = random.randrange(10_000, 30_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
