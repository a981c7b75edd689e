"""Pretrain on a cluster: ``deepspeed --hostfile hostfile launcher/pretrain.py [--config run.toml] [--section.key …]``.

On one machine, ``deepspeed --num_gpus N`` or ``torchrun --standalone --nproc_per_node N`` starts it without ssh.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

if __name__ == "__main__":
    # Imports create a million objects that all stay alive. Scanning them for garbage repeatedly takes a tenth of the
    # start.
    gc.disable()

# The script's own folder would shadow top-level modules with the same names; import from the repository instead.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from longctx_train import end_if_names_clash

# Before any of our packages: a foreign one with the same name would end in an ImportError.
end_if_names_clash()

from launcher.cluster.exit import DONE, NOT_IN_STORE, end_stopped, run_script
from launcher.cluster.hostfile import check_hostfile
from launcher.cluster.scheduler import check_tasks
from launcher.cluster.stop_request import StopRequest
from launcher.config.load_config import load_run_config
from launcher.config.run_config_rules import check_run
from launcher.run_folder import LOGS
from parallel.comm.process import start_process_group, stop_process_group
from parallel.runtime.device import choose_device
from parallel.runtime.launched import environment_rank


def main(argv: list[str], stop: StopRequest | None = None) -> int:
    """Validate everything first, then train. Return the exit code. ``stop`` may already be requested."""
    # Report a user's mistakes first, on every rank, before any rank waits for another or allocates.
    rank, world_size = environment_rank()
    config = load_run_config(argv, quiet=rank != 0)
    check_tasks(config.run.hostfile, argv)
    check_hostfile(config.run.hostfile, world_size)
    parallel = config.parallel
    device = choose_device(
        config.run.device, context=parallel.context, ulysses=parallel.ulysses, expert=parallel.expert
    )
    check_run(config, world_size)
    traces = Path(config.run.output_dir) / LOGS
    stop = stop or StopRequest()
    stop.max_seconds, stop.launcher_timeout_seconds = config.run.max_seconds, config.run.orphan_seconds
    start_process_group(
        timeout_seconds=config.run.timeout_seconds,
        rendezvous_seconds=config.run.meet_seconds,
        device=device,
        traces=traces,
    )
    # Not earlier: before the rendezvous, a signal ends each rank by itself.
    stop.listen()
    # DeepSpeed selects a device when it is imported, so import it after the choice.
    from launcher.training.setup import build_run
    from launcher.training.trainer import Trainer

    # Re-enable before anything large is built: garbage that holds tensors must be freed.
    gc.enable()

    trainer = Trainer(build_run(config, device, stop))
    stopped = trainer.train()
    # Not earlier: after an error, NCCL would wait here for kernels that wait for this rank.
    stop_process_group()
    if stopped is not None:
        return end_stopped(stopped)
    if not trainer.is_in_store:
        return NOT_IN_STORE
    return DONE


if __name__ == "__main__":
    stop_request = StopRequest()
    run_script(lambda: main(sys.argv[1:], stop_request), on_orphaned=stop_request.on_launcher_exit)
