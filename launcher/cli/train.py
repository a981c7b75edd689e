"""The verbs that run over ranks: ``train`` and ``verify``, and the start of others with ``--ranks``."""

from __future__ import annotations

import math
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from launcher.cli.console import command, note
from launcher.config.flags import key_of_flag, take_flag
from launcher.wording import plural
from longctx.errors import ClusterError, ConfigError

MOST_RANKS = 1024
"""Ranks of one machine."""


def train(
    *,
    ranks: int = 0,
    hostfile: str = "",
    settings: Annotated[tuple[str, ...], tyro.conf.Suppress] = (),
) -> int:
    """Train: start the ranks of a run, on this machine or on the hosts of a file.

    All other flags are the run's settings. Ctrl-C saves, and exits with 75.

    Args:
        ranks: Processes on this machine; 0 is one each GPU, and without GPUs as many as the settings need.
        hostfile: A file with a line `HOST slots=N` for each machine, which are reached over ssh.
    """
    from launcher.config.load import load_run_config

    # A user's mistake in the settings is reported here, once, before any rank begins.
    config = load_run_config(list(settings))
    needed = math.lcm(config.parallel.context, config.parallel.expert)
    if not hostfile:
        settings = _fitted(settings, ranks or _num_gpus(settings), config.parallel.context)
    return start("train", "pretrain.py", settings, ranks=ranks, hostfile=hostfile, needed=needed)


def _num_gpus(settings: Sequence[str]) -> int:
    from launcher.cluster.ranks import num_gpus

    return 0 if _on_cpu(settings) else num_gpus()


def _fitted(settings: Sequence[str], ranks: int, context: int) -> tuple[str, ...]:
    """Return the settings with a context degree that fits the ranks, if only the quickstart has chosen another one."""
    chosen = {key_of_flag(word) for word in settings if word.startswith("--")}
    if not ranks or ranks % context == 0 or chosen & {"config", "parallel.context", "run.start_from"}:
        return tuple(settings)
    fitting = str(math.gcd(ranks, context))
    note(f"The quickstart's parallel.context={context} does not divide {plural(ranks, 'rank')}: it is {fitting} here.")
    return (*settings, "--parallel.context", fitting)


def verify(
    *,
    ranks: int = 0,
    hostfile: str = "",
    settings: Annotated[tuple[str, ...], tyro.conf.Suppress] = (),
) -> int:
    """Compare a run's configuration over ranks with one plain process: loss, gradients, weights.

    All other flags are the run's settings, as of `train`. With --probe leak it looks whether documents of a packed row
    see one another. Exit code 1 where they differ, or do.

    Args:
        ranks: Processes on this machine; 0 is one each GPU, and without GPUs as many as the settings need.
        hostfile: A file with a line `HOST slots=N` for each machine, which are reached over ssh.
    """
    from launcher.config.load import load_run_config
    from launcher.verification.probes import without_probe

    config = load_run_config(without_probe(settings)[0])
    needed = math.lcm(config.parallel.context, config.parallel.expert)
    return start("verify", "verify.py", settings, ranks=ranks, hostfile=hostfile, needed=needed)


def start(verb: str, script: str, arguments: Sequence[str], *, ranks: int, hostfile: str, needed: int = 1) -> int:
    """Start the ranks of a verb's script and return their exit code. ``needed`` ranks are the least without GPUs.

    Raise ConfigError for both ``ranks`` and ``hostfile`` and in a rank, and ClusterError for an unusable file and in
    one of several tasks of a scheduler.
    """
    from launcher.cluster.ranks import num_gpus, run_ranks
    from launcher.cluster.scheduler import check_tasks

    if "RANK" in os.environ:
        raise ConfigError(
            f"longctx {verb} starts ranks itself, and a launcher has started this process as one (RANK is set).\n"
            f"Let the launcher start launcher/{script}, or type longctx {verb} without it."
        )
    check_tasks(take_flag(list(arguments), "--run.hostfile")[1] or "launcher", arguments, script=f"launcher/{script}")
    if hostfile and ranks:
        raise ConfigError(f"--ranks {ranks} is of this machine, and --hostfile {hostfile} names them all. Give one.")
    if not 0 <= ranks <= MOST_RANKS:
        raise ConfigError(f"--ranks {ranks} must be 1 to {MOST_RANKS}, or 0 for one each GPU.")
    if hostfile:
        return _run_on_hosts(command(verb), hostfile, script, arguments)
    if verb == "generate" and sys.stdin.isatty() and not _names_prompts(arguments):
        raise ConfigError(
            "--ranks: several ranks read no terminal. Give the turns in a file: longctx generate … < F.txt"
        )
    if not ranks and _on_cpu(arguments):
        ranks = needed
    ranks = ranks or num_gpus() or needed
    # The ranks need seconds for their first word: they import torch and DeepSpeed.
    note(f"Starting {plural(ranks, 'rank')} of {verb} on this machine.")
    return run_ranks(command(verb), script, arguments, ranks)


def _names_prompts(arguments: Sequence[str]) -> bool:
    """Return whether a command line of ``generate`` says what to continue, other than what a terminal types."""
    given = [take_flag(list(arguments), name)[1] for name in ("--prompt", "--prompt-file", "--prompts-file")]
    return any(value not in (None, "-") for value in given)


def _on_cpu(arguments: Sequence[str]) -> bool:
    """Return whether ranks are asked to compute on the CPU."""
    return "cpu" in (take_flag(list(arguments), name)[1] for name in ("--run.device", "--device"))


def _run_on_hosts(called: str, hostfile: str, script: str, arguments: Sequence[str]) -> int:
    """Run ``launcher/script`` on all slots of a hostfile, by deepspeed over ssh; return its exit code.

    If the file names this machine alone, its ranks are started here. Raise ClusterError for an unusable file or a host
    that does not answer, and ConfigError for text that a shell on another host would not read literally.
    """
    from launcher.cluster.hostfile import is_own_name, read_hostfile
    from launcher.cluster.ranks import ROOT, run_ranks
    from launcher.cluster.remote_shell import check_deepspeed_line
    from launcher.cluster.sessions import Stop, run_command
    from launcher.supervise.hosts import silent_hosts

    slots = read_hostfile(Path(hostfile))
    if len(slots) == 1 and is_own_name(next(iter(slots)), socket.gethostname()):
        return run_ranks(called, script, arguments, sum(slots.values()))
    # The program beside this Python, which ranks know by its name. Without --local_rank, which differs between ranks
    # and which no script reads; and a single other host must not become this machine.
    starter = [str(Path(sys.executable).parent / "deepspeed"), "--no_local_rank", "--force_multi"]
    starter += ["--hostfile", hostfile, str(ROOT / "launcher" / script)]
    check_deepspeed_line(starter, arguments)
    silent = silent_hosts(slots, ask_one=True)
    if silent:
        raise ClusterError(
            f"{', '.join(silent)} of {hostfile} does not answer over ssh without a password.\n"
            f"{command('doctor', '--hostfile', hostfile)} asks each host and says what is wrong there."
        )
    stop = Stop()
    with stop.listening():
        # A supervisor of this process looks for the ranks in its session.
        code, _ = run_command(starter + list(arguments), stop, own_session=False)
    return code
