"""Import of DeepSpeed checkpoints as step-0 checkpoints, by DeepSpeed's own tool in a separate process.

Its files are pickles that cannot be read without executing them: they hold the run's settings and arguments as well as
tensors. So the import requires a flag, and the executed code neither runs in this process nor sees its secrets.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from longctx.checkpoint_manifest import reject_other_formats
from longctx.conversion.auxiliary_files import copy_auxiliary_files, find_auxiliary_files, log_skipped_files
from longctx.conversion.hf_conversion import Conversion, check_folders, import_hf
from longctx.conversion.weights.weights_folder import check_is_fetched, resolve_weights_path
from longctx.errors import CheckpointError
from longctx.files import check_target_free
from longctx.tokenizer.chat_templates import hf_path

TOOL = "deepspeed.utils.zero_to_fp32"
CONFIG = "config.json"
LATEST = "latest"
ALLOWED_ENVIRONMENT = (
    "PATH",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "DS_ACCELERATOR",
    "VIRTUAL_ENV",
)
"""Environment variables that the tool gets: no token and no password is among them."""
TIMEOUT_SECONDS = 24 * 3600
_MAX_ERROR_CHARACTERS = 400


def import_deepspeed(source: str | Path, output: str | Path, *, execute_pickles: bool, **options: Any) -> Conversion:
    """Import a Hugging Face model saved by ``DeepSpeedEngine.save_checkpoint``, ZeRO 1 to 3.

    ``source`` is the folder with ``latest`` and ``global_stepN``; it must contain the model's ``config.json``, and its
    tokenizer if that is to be kept. Weights come from the float32 master weights; moments are left behind. ``options``
    are passed to ``import_hf``. Memory holds all float32 weights, and during the import a second copy is on disk next
    to the output.

    Raise CheckpointError without ``execute_pickles``, which allows the files to execute any code; for a folder that is
    not DeepSpeed's or has no config; and, with DeepSpeed's last output, if the tool fails.
    """
    source, output = Path(source), Path(output)
    check_folders(source, output)
    _check_source(source)
    if not execute_pickles:
        reject_other_formats(source)
    # Fail early: the tool may run for hours.
    check_target_free(output, CheckpointError)
    resolve_weights_path(source, CONFIG, named_by=source)
    # A Git LFS pointer has a state file's name but not its bytes.
    for path in [source / CONFIG, source / LATEST, *source.rglob("*_states.pt")]:
        check_is_fetched(path)
    auxiliary = find_auxiliary_files(source, include_processors=True)
    states = [path.name for path in source.iterdir() if path.is_dir() or path.suffix in (".pt", ".py")]
    log_skipped_files(source, states + [CONFIG, LATEST] + [hf_path(name) for name in auxiliary])
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as folder:
        # The checkpoint's origin is named after its folder.
        weights = Path(folder) / source.name
        weights.mkdir()
        _run_tool(source, weights)
        # ``import_hf`` reads a single folder.
        shutil.copyfile(source / CONFIG, weights / CONFIG)
        copy_auxiliary_files(auxiliary, weights)
        return import_hf(weights, output, **options)


def _check_source(source: Path) -> None:
    """Raise CheckpointError unless the folder has DeepSpeed states, a tag and a config."""
    try:
        reject_other_formats(source)
    except CheckpointError:
        pass
    else:
        raise CheckpointError(
            f"{source} is not a DeepSpeed checkpoint: neither it nor its subfolders contain a *_states.pt.\n"
            "Give the folder that contains the file `latest`; import a Hugging Face folder with --from hf."
        )
    if not (source / LATEST).is_file():
        raise CheckpointError(
            f"{source / LATEST} is missing; it must contain the state folder's name (global_stepN).\n"
            f"Give the parent folder, or write the name into the file: echo global_step1000 > {source / LATEST}"
        )
    if not (source / CONFIG).is_file():
        raise CheckpointError(
            f"{source / CONFIG} is missing: DeepSpeed does not store the architecture.\n"
            "Put the model's Hugging Face config.json there, and its tokenizer files."
        )


def _run_tool(source: Path, output: Path) -> None:
    command = [sys.executable, "-m", TOOL, str(source), str(output), "--safe_serialization"]
    environment = {name: os.environ[name] for name in ALLOWED_ENVIRONMENT if name in os.environ}
    # In a separate process: a pickle could read a trainer's tokens and open files.
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    if done.returncode:
        stderr_lines = done.stderr.strip().splitlines() or ["nothing"]
        raise CheckpointError(
            f"{source} cannot be imported: DeepSpeed's {TOOL} failed with exit code {done.returncode}:\n"
            f"  {stderr_lines[-1][:_MAX_ERROR_CHARACTERS]}\n"
            "It reads ZeRO 1 to 3, from the same or a similar DeepSpeed version."
        )
