"""The verbs that run over ranks: ``train`` and ``verify``, and the start of other verbs with ``--ranks``."""

from __future__ import annotations

import math
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from launcher.cli.cli_output import command_line, note
from launcher.config.flags import key_of_flag, take_flag
from launcher.wording import format_count
from longctx.errors import ClusterError, ConfigError

MOST_RANKS = 1024
"""Maximum ranks on one machine."""


def train(
    *,
    ranks: int = 0,
    hostfile: str = "",
    settings: Annotated[tuple[str, ...], tyro.conf.Suppress] = (),
) -> int:
    """Train: start a run's ranks on this machine or on the hosts in a file.

    All other flags are the run's settings. Ctrl-C saves a checkpoint and exits with 75.

    Args:
        ranks: Processes on this machine; 0 is one per GPU, and without GPUs as many as the settings need.
        hostfile: File with a line `HOST slots=N` per machine; these are reached over ssh.
    """
    from launcher.config.load_config import load_run_config

    # Report invalid settings here, once, before any rank starts.
    config = load_run_config(list(settings))
    # The smallest world size that both degrees divide.
    needed = math.lcm(config.parallel.context, config.parallel.expert)
    if not hostfile:
        # On one machine only: the quickstart must run on any number of GPUs without further flags.
        settings = _fit_context(settings, ranks or _num_gpus(settings), config.parallel.context)
    return start("train", "pretrain.py", settings, ranks=ranks, hostfile=hostfile, needed=needed)


def _num_gpus(settings: Sequence[str]) -> int:
    from launcher.cluster.local_ranks import num_gpus

    return 0 if _on_cpu(settings) else num_gpus()


def _fit_context(settings: Sequence[str], ranks: int, context: int) -> tuple[str, ...]:
    """Return the settings with a fitting context degree if the current one is only the quickstart's default."""
    chosen = {key_of_flag(word) for word in settings if word.startswith("--")}
    if not ranks or ranks % context == 0 or chosen & {"config", "parallel.context", "run.start_from"}:
        return tuple(settings)
    fitting = str(math.gcd(ranks, context))
    note(f"The quickstart's parallel.context={context} does not divide {format_count(ranks, 'rank')}: using {fitting}.")
    return (*settings, "--parallel.context", fitting)


def verify_ranks(
    *,
    ranks: int = 0,
    hostfile: str = "",
    settings: Annotated[tuple[str, ...], tyro.conf.Suppress] = (),
) -> int:
    """Compare a run's configuration over ranks with one plain process: loss, gradients, weights.

    All other flags are the run's settings, as for `train`. --probe leak tests whether documents in a packed row see
    each other. The exit code is 1 if the results differ, or if documents leak.

    Args:
        ranks: Processes on this machine; 0 is one per GPU, and without GPUs as many as the settings need.
        hostfile: File with a line `HOST slots=N` per machine; these are reached over ssh.
    """
    from launcher.config.load_config import load_run_config
    from launcher.verification.probes import without_probe

    config = load_run_config(without_probe(settings)[0])
    needed = math.lcm(config.parallel.context, config.parallel.expert)
    return start("verify", "verify.py", settings, ranks=ranks, hostfile=hostfile, needed=needed)


def start(verb: str, script: str, arguments: Sequence[str], *, ranks: int, hostfile: str, needed: int = 1) -> int:
    """Start the ranks for a verb's script and return their exit code. Without GPUs, ``needed`` ranks are the default.

    Raise ConfigError if both ``ranks`` and ``hostfile`` are given, or inside a rank. Raise ClusterError if the file is
    unusable, or in one of several scheduler tasks.
    """
    from launcher.cluster.local_ranks import num_gpus, run_ranks
    from launcher.cluster.scheduler import check_tasks

    if "RANK" in os.environ:
        raise ConfigError(
            f"longctx {verb} starts ranks itself, but a launcher started this process as a rank (RANK is set).\n"
            f"Let the launcher start launcher/{script}, or run longctx {verb} without it."
        )
    check_tasks(take_flag(list(arguments), "--run.hostfile")[1] or "launcher", arguments, script=f"launcher/{script}")
    if hostfile and ranks:
        raise ConfigError(
            f"--ranks {ranks} is for this machine only, and --hostfile {hostfile} sets all ranks. Give one of them."
        )
    if not 0 <= ranks <= MOST_RANKS:
        raise ConfigError(f"--ranks {ranks} must be 1 to {MOST_RANKS}, or 0 for one per GPU.")
    if hostfile:
        return _run_on_hosts(command_line(verb), hostfile, script, arguments)
    if verb == "generate" and sys.stdin.isatty() and not _names_prompts(arguments):
        raise ConfigError(
            "--ranks: several ranks cannot read a terminal. Give the prompts in a file: longctx generate … < F.txt"
        )
    # Without GPUs to count, the settings determine the ranks.
    if not ranks and _on_cpu(arguments):
        ranks = needed
    ranks = ranks or num_gpus() or needed
    # Ranks take seconds until their first output, because they import torch and DeepSpeed.
    note(f"Starting {format_count(ranks, 'rank')} of {verb} on this machine.")
    return run_ranks(command_line(verb), script, arguments, ranks)


def _names_prompts(arguments: Sequence[str]) -> bool:
    """Return True if a ``generate`` command line gives a prompt by text or file, not by standard input."""
    given = [take_flag(list(arguments), name)[1] for name in ("--prompt", "--prompt-file", "--prompts-file")]
    return any(value not in (None, "-") for value in given)


def _on_cpu(arguments: Sequence[str]) -> bool:
    """Return True if the ranks should compute on the CPU."""
    return "cpu" in (take_flag(list(arguments), name)[1] for name in ("--run.device", "--device"))


def _run_on_hosts(called: str, hostfile: str, script: str, arguments: Sequence[str]) -> int:
    """Execute ``launcher/script`` on all slots in a hostfile, by deepspeed over ssh; return its exit code.

    If the file contains only this machine, its ranks are started locally. Raise ClusterError for an unusable file or a
    host that does not answer, and ConfigError for text that a remote shell would not read literally.
    """
    from launcher.cluster.hostfile import is_own_name, read_hostfile
    from launcher.cluster.local_ranks import ROOT, run_ranks
    from launcher.cluster.remote_shell import check_deepspeed_line
    from launcher.cluster.sessions import SignalForwarder, run_in_group
    from launcher.supervise.host_selection import offline_hosts

    slots = read_hostfile(Path(hostfile))
    if len(slots) == 1 and is_own_name(next(iter(slots)), socket.gethostname()):
        return run_ranks(called, script, arguments, sum(slots.values()))
    # Use the program next to this Python, which ranks find by its name. --local_rank differs between ranks and is read
    # by no script. Without --force_multi, deepspeed would start the ranks for a single remote host on this machine.
    launch_words = [str(Path(sys.executable).parent / "deepspeed"), "--no_local_rank", "--force_multi"]
    launch_words += ["--hostfile", hostfile, str(ROOT / "launcher" / script)]
    check_deepspeed_line(launch_words, arguments)
    offline = offline_hosts(slots, ask_one=True)
    if offline:
        raise ClusterError(
            f"{', '.join(offline)} of {hostfile} does not answer over ssh without a password.\n"
            f"{command_line('doctor', '--hostfile', hostfile)} checks each host and reports the cause."
        )
    stop = SignalForwarder()
    with stop.listening():
        # A supervisor for this process searches its session for the ranks.
        code, _ = run_in_group(launch_words + list(arguments), stop, own_session=False)
    return code
