"""The files beside a model's weights that a round trip must not lose: an HF-only tokenizer and generation settings.

A checkpoint carries them byte for byte. Only files of these names are carried; others of the folder stay behind.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from longctx.checkpoint_format import TOKENIZER, CheckpointReader
from longctx.conversion.weights.folder import checked_path
from longctx.errors import CheckpointError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Beside ``tokenizer.model``, which every checkpoint may have."""
CARRIED_FILES = (*TOKENIZER_FILES, "generation_config.json")


def find_companions(folder: Path) -> list[Path]:
    """The folder's files to carry, ``tokenizer.model`` included; CheckpointError for a link that leads out of it."""
    found: list[Path] = []
    for name in (TOKENIZER, *CARRIED_FILES):
        path = folder / name
        # A link that leads nowhere does not exist; it is refused instead of left out.
        if path.exists() or path.is_symlink():
            found.append(checked_path(folder, name, named_by=folder))
    return found


def carried_names(reader: CheckpointReader) -> list[str]:
    """Files that an imported checkpoint carries besides ``tokenizer.model``, as its manifest lists them."""
    return [name for name in CARRIED_FILES if name in reader.manifest["files"]]


def has_own_tokenizer(reader: CheckpointReader) -> bool:
    """Whether a checkpoint carries Hugging Face tokenizer files, which are then exported as they came."""
    return any(name in TOKENIZER_FILES for name in carried_names(reader))


def copy_companions(reader: CheckpointReader, output: Path) -> list[str]:
    """Copy what an imported checkpoint carries into a Hugging Face folder, and check the bytes; the names copied."""
    names = carried_names(reader)
    # Without tokenizer files of its own the folder gets an export of tokenizer.model instead (``save_hf``).
    if has_own_tokenizer(reader) and (reader.folder / TOKENIZER).is_file():
        names.append(TOKENIZER)
    for name in names:
        shutil.copyfile(reader.folder / name, output / name)
        if (output / name).read_bytes() != (reader.folder / name).read_bytes():
            raise CheckpointError(f"{name} did not come back from {output} as it was written. Check the disk.")
    return names
