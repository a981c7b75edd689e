"""Evaluate, over ranks: ``deepspeed --hostfile hostfile launcher/evaluate.py --checkpoint DIR --tasks A,B …``.

The options are those of the verb ``evaluate``, which is the same in one process.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path

# The script's own folder would shadow top-level modules of the same names; the repository is what we import from.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from longctx_train import end_if_names_clash

# Before any package of ours: another's of the same name would end in an ImportError.
end_if_names_clash()

from launcher.cli.console import warnings_on_stderr
from launcher.cli.verbs import explained, parse
from launcher.cluster.exit import run_to_exit_code
from launcher.cluster.scheduler import check_tasks
from launcher.config.flags import take_flag
from parallel.runtime.process import environment_rank


def main(argv: list[str]) -> int | None:
    """Parse on every rank alike, then evaluate."""
    rank, _ = environment_rank()
    # The deepspeed launcher adds --local_rank, which we do not need: each rank finds its device by itself.
    arguments = [argument for argument in argv if not argument.startswith("--local_rank")]
    with ExitStack() as stack:
        nowhere = stack.enter_context(Path(os.devnull).open("w"))
        # Results, help and what is wrong with the command line are the same on every rank.
        if rank != 0:
            stack.enter_context(redirect_stdout(nowhere))
        with ExitStack() as parsing:
            if rank != 0:
                parsing.enter_context(redirect_stderr(nowhere))
            evaluate = parse(["evaluate", *arguments])
        _, hostfile = take_flag(arguments, "--run.hostfile")
        check_tasks(hostfile or "launcher", arguments, script="launcher/evaluate.py")
        with warnings_on_stderr():
            return explained(evaluate)


if __name__ == "__main__":
    sys.exit(run_to_exit_code(lambda: main(sys.argv[1:]), interrupted="Interrupted."))
