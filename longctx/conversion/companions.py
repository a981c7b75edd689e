"""The files beside a model's weights that a round trip must not lose: its tokenizer and generation settings.

A checkpoint carries them byte for byte. Only files of these names are carried; others of the folder stay behind.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from longctx.checkpoint_format import CheckpointReader
from longctx.conversion.tokenizer import FAST_FILES
from longctx.conversion.weights.folder import checked_path
from longctx.errors import CheckpointError
from longctx.tokenizer.load import CARRIED_FILES


def find_companions(folder: Path) -> list[Path]:
    """The folder's files to carry; CheckpointError for a link that leads out of it."""
    found: list[Path] = []
    for name in CARRIED_FILES:
        path = folder / name
        # A link that leads nowhere does not exist; it is refused instead of left out.
        if path.exists() or path.is_symlink():
            found.append(checked_path(folder, name, named_by=folder))
    return found


def carried_names(reader: CheckpointReader) -> list[str]:
    """The carried files of a checkpoint, as its manifest lists them."""
    return [name for name in CARRIED_FILES if name in reader.manifest["files"]]


def has_own_tokenizer(reader: CheckpointReader) -> bool:
    """Whether a checkpoint carries Hugging Face tokenizer files, which are then exported as they came."""
    return any(name in FAST_FILES for name in carried_names(reader))


def copy_companions(reader: CheckpointReader, output: Path, names: list[str]) -> list[str]:
    """Copy files that a checkpoint carries into a Hugging Face folder, and check the bytes; returns ``names``."""
    for name in names:
        shutil.copyfile(reader.folder / name, output / name)
        if (output / name).read_bytes() != (reader.folder / name).read_bytes():
            raise CheckpointError(f"{name} did not come back from {output} as it was written. Check the disk.")
    return names
