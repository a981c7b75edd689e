"""The verb ``run``."""

from __future__ import annotations

from typing import Annotated

from tyro.conf import Positional, arg

from launcher.cli.cli_output import note
from longctx.errors import ConfigError


def supervise_run(
    command: Annotated[Positional[tuple[str, ...]], arg(metavar="COMMAND")],
    *,
    retries: int = 3,
    wait_seconds: float = 10.0,
) -> int:
    """Start a training command, and restart it from its newest good checkpoint when it fails.

    A dead rank, a lost host or a killed launcher costs only the steps since the last checkpoint. Hosts in the hostfile
    that no longer answer are left out if the remaining ones form a valid run. Restarts that cannot help are not tried:
    after exit code 2, or if two attempts in a row end at the same step, it stops. With --run.resume auto in the
    command, the same line starts a run and resumes it.

    Signals go to the training and end this command too. The exit code is the last attempt's.

    Args:
        command: Training command line, after `--`.
        retries: Restarts after the first attempt.
        wait_seconds: Pause before the first restart, doubled before each further one, up to 300, until the run
            advances.
    """
    if retries < 0:
        raise ConfigError(f"--retries {retries} must be at least 0.")
    if not 0 <= wait_seconds <= 86400:
        raise ConfigError(f"--wait-seconds {wait_seconds:g} must be between 0 and 86400 (one day).")
    from launcher.cluster.hostfile import read_hostfile
    from launcher.cluster.remote_shell import check_deepspeed_line
    from launcher.supervise.restart_policy import RetryLimits
    from launcher.supervise.supervisor import Supervised
    from launcher.supervise.training_command import TrainingCommand

    limits = RetryLimits(retries=retries, wait_seconds=wait_seconds)
    line = TrainingCommand.of(command)
    check_deepspeed_line(line.launch_words, line.arguments)
    if line.hostfile is not None:
        read_hostfile(line.hostfile)  # a restart would not fix an error in it
    return Supervised.of(line, limits, note).run()
