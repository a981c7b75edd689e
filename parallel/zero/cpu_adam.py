"""DeepSpeed's AdamW for master weights in CPU memory: compiled on first use per machine, then reused."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from longctx.errors import ConfigError

log = logging.getLogger(__name__)

_NAME = "cpu_adam"
"""DeepSpeed's name for the extension, and for its build folder."""
_LONGEST_BUILD_SECONDS = 900.0


def compile_cpu_adam() -> None:
    """Compile the extension unless an earlier run has, and log it. Raise ConfigError if that fails.

    Ranks on one machine wait for the first one that compiles.
    """
    device = get_accelerator()
    assert device is not None, "importing DeepSpeed chooses one"
    builder = device.create_op_builder("CPUAdamBuilder")
    assert builder is not None, "every device has this one"
    # The extension counts its threads on load: with all cores each, the ranks on a machine would stall one another.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    folder, started = _folder(), time.perf_counter()
    if not (folder / f"{_NAME}.so").exists():
        log.info("zero.offload: compiling DeepSpeed's AdamW for this processor into %s (once, takes minutes).", folder)
    wait_for_build(folder / "lock")
    try:
        builder.load(verbose=False)
    except Exception as error:  # a missing ninja, compiler or header each raises another class
        raise ConfigError(
            f"zero.offload needs DeepSpeed's AdamW, which could not be compiled into {folder}:\n"
            f"{_last_lines(str(error))}\n"
            "Install g++ and ninja (the environment's bin folder must be in PATH), or set zero.offload=none."
        ) from error
    log.info("DeepSpeed's CPU AdamW was ready after %.1f s.", time.perf_counter() - started)


def wait_for_build(lock: Path) -> None:
    """Return once no other process compiles. Raise ConfigError if the lock is older than any build: that build was
    killed.

    PyTorch's own wait has no timeout and logs no message.
    """
    waits = False
    while True:
        try:
            age = time.time() - lock.stat().st_mtime
        except FileNotFoundError:
            return
        if age > _LONGEST_BUILD_SECONDS:
            raise ConfigError(
                f"zero.offload: {lock} is {age / 60:.0f} minutes old, so DeepSpeed's AdamW build was killed.\n"
                "Remove that file."
            )
        if not waits:
            log.info("Waiting for another process to compile DeepSpeed's AdamW (%s).", lock)
            waits = True
        time.sleep(0.2)


def build_cpu_adam(groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> Any:
    """Build AdamW with float32 moments; it steps like PyTorch's, with the CPU's vector units."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(groups, lr=lr, betas=betas, eps=eps, adamw_mode=True, fp32_optimizer_states=True)


def _folder() -> Path:
    from torch.utils.cpp_extension import get_default_build_root

    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root:
        return Path(root) / _NAME
    # PyTorch's default root has one subfolder per Python and CUDA version.
    found = sorted(Path(get_default_build_root()).glob(f"*/{_NAME}"))
    if found:
        return found[-1]
    return Path(get_default_build_root()) / _NAME


def _last_lines(text: str, most: int = 6) -> str:
    """Return the end of a long message, which contains the compiler's error."""
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(f"  {line.strip()[:200]}" for line in lines[-most:])
