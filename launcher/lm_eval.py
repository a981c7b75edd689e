"""Run lm-eval with one of our models over ranks: ``deepspeed --hostfile hostfile launcher/lm_eval.py --model_args …``.

Options are those of ``lm_eval run``. ``python -m launcher.lm_eval`` does the same in one process.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

# The script's own folder would shadow lm-eval itself; import from the repository instead.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from longctx_train import end_if_names_clash

# Before any of our packages: a foreign one with the same name would end in an ImportError.
end_if_names_clash()

from launcher.cluster.exit import run_script
from launcher.cluster.hostfile import check_hostfile
from launcher.cluster.scheduler import check_tasks
from launcher.config.flags import take_flag, without_local_rank
from launcher.evaluation.harness.settings import parse_device
from longctx.errors import ConfigError
from parallel.comm.process import process_group
from parallel.runtime.device import choose_device
from parallel.runtime.launched import environment_rank

ABORT_MESSAGE = "Interrupted. With --use_cache PATH, the same command continues from its cached results."
TIMEOUT_SECONDS = 1800.0
"""Seconds that ranks working on one text wait for each other."""


def main(argv: list[str]) -> int | None:
    """Run lm-eval on rank 0, with the model on all ranks."""
    rank, world_size = environment_rank()
    arguments, hostfile = take_flag(without_local_rank(argv), "--run.hostfile")
    check_tasks(hostfile or "launcher", arguments, script="launcher/lm_eval.py")
    check_hostfile(hostfile or "launcher", world_size)
    if find_spec("lm_eval") is None:
        raise ConfigError("lm-eval is not installed. Install it: pip install 'longctx-train[lm-eval]'")
    # A single process needs no group: lm-eval builds the model itself.
    if world_size == 1:
        from launcher.evaluation.harness.lm_eval_model import run_lm_eval

        run_lm_eval(arguments)
        return None
    _, requested_device = take_flag(arguments, "--device")
    device = choose_device(parse_device(requested_device), "--device")
    with process_group(timeout_seconds=TIMEOUT_SECONDS, device=device):
        # DeepSpeed selects a device when it is imported, so import it after the choice.
        from launcher.evaluation.harness.request_server import Ranks

        ranks = Ranks(device)
        if rank != 0:
            # Other ranks only compute; lm-eval itself runs on rank 0.
            return ranks.serve()
        from launcher.evaluation.harness.lm_eval_model import run_lm_eval, share_ranks

        share_ranks(ranks)
        try:
            run_lm_eval(arguments)
        except SystemExit:
            # Help or a usage error has been printed; any other error ends all ranks by itself.
            ranks.end()
            raise
        ranks.end()
        return None


if __name__ == "__main__":
    run_script(lambda: main(sys.argv[1:]), abort_message=ABORT_MESSAGE)
