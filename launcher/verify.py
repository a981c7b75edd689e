"""Compare a run's configuration with one plain process, on the user's own cluster.

    deepspeed --hostfile hostfile launcher/verify.py --config run.toml

Runs three steps of a small model with the run's own degrees, layout, transport, kernel, ZeRO stage, dtype and chunks,
and three steps in one process, and compares loss, gradient norm, every gradient and every weight. Exit code 1 if they
differ.

With ``--probe leak`` it changes one token in a packed row's first document instead, and checks whether another document
changes: at the run's degrees, in its layout, kernel, chunks and mixers. Exit code 1 if one does.
"""

from __future__ import annotations

import sys
from pathlib import Path

# The script's own folder would shadow top-level modules with the same names; import from the repository instead.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from longctx_train import end_if_names_clash

# Before any of our packages: a foreign one with the same name would end in an ImportError.
end_if_names_clash()

from launcher.cluster.exit import FAILED, run_script
from launcher.cluster.hostfile import check_hostfile
from launcher.cluster.scheduler import check_tasks
from launcher.config.flags import end_with
from launcher.config.load_config import load_run_config
from launcher.config.run_config_rules import check_run
from launcher.verification.probes import without_probe
from longctx.untrusted.terminal import for_terminal
from parallel.comm.process import start_process_group, stop_process_group
from parallel.runtime.device import choose_device
from parallel.runtime.launched import environment_rank


def main(argv: list[str]) -> int | None:
    """Validate everything first, then compare with one process."""
    rank, world_size = environment_rank()
    if argv in (["--help"], ["-h"]):
        end_with(
            f"{__doc__}\nThe settings are those of `longctx train`; `longctx train --help all` explains each.",
            quiet=rank != 0,
        )
    argv, probe = without_probe(argv)
    config = load_run_config(argv, quiet=rank != 0)
    check_tasks(config.run.hostfile, argv)
    check_hostfile(config.run.hostfile, world_size)
    parallel = config.parallel
    device = choose_device(
        config.run.device, context=parallel.context, ulysses=parallel.ulysses, expert=parallel.expert
    )
    check_run(config, world_size)
    start_process_group(
        timeout_seconds=config.run.timeout_seconds, rendezvous_seconds=config.run.meet_seconds, device=device
    )
    # DeepSpeed selects a device when it is imported, so import it after the choice.
    from launcher.verification.verify_run import probe_run, verify_run

    result = probe_run(config, device) if probe else verify_run(config, device)
    if rank == 0:
        sys.stdout.write(for_terminal(f"{result.text}\n", sys.stdout))
    stop_process_group()
    if not result.held:
        return FAILED
    return None


if __name__ == "__main__":
    run_script(lambda: main(sys.argv[1:]), abort_message="Interrupted.")
