"""Files next to a model's weights that a round trip must keep: tokenizer, settings, licence and model card.

A checkpoint carries them byte for byte. Only files with known names are carried; the log names the others.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from longctx.checkpoint_format import CheckpointReader
from longctx.conversion.passthrough import PROCESSORS
from longctx.conversion.tensor_mismatches import format_names
from longctx.conversion.tokenizer_export import FAST_FILES
from longctx.conversion.weights.weights_folder import check_is_fetched, resolve_weights_path
from longctx.errors import CheckpointError, DataError
from longctx.tokenizer.chat_templates import TEMPLATES, find_template_files, hf_path, is_template
from longctx.tokenizer.load_tokenizer import COPIED_FILES, MOST_TOKENIZER_BYTES
from longctx.untrusted.strict_json import printable, shown

log = logging.getLogger(__name__)

_CARD = "readme"
_NOTICE = re.compile(rf"(licen[sc]e|copying|notice|use_policy|{_CARD})([._-][A-Za-z0-9._+-]{{1,80}})?", re.IGNORECASE)
"""Licences, notices that they ask to pass on, and the model card."""
_MOST_NOTICE_BYTES = 4 * 2**20
_MOST_NOTICES = 16
_NOT_NAMED = (".gitattributes", ".gitignore", ".DS_Store")
"""Files that belong to no model, and need no warning."""


def find_auxiliary_files(folder: Path, *, include_processors: bool = False) -> dict[str, Path]:
    """Return the folder's files to carry, by checkpoint name; ``include_processors`` adds image processor settings.

    Raise CheckpointError for a link out of the folder, for a Git LFS pointer, and for a file that is too large.
    """
    found: dict[str, Path] = {}
    for name in COPIED_FILES + PROCESSORS * include_processors:
        path = folder / name
        # A dangling link does not exist; it is rejected instead of left out.
        if path.exists() or path.is_symlink():
            found[name] = resolve_weights_path(folder, name, named_by=folder)
    try:
        found |= find_template_files(folder)
    except DataError as error:
        raise CheckpointError(str(error)) from error
    found |= find_notices(folder)
    # Every checkpoint in a run gets a copy, so the size is bounded: no such file is larger.
    for path in found.values():
        check_is_fetched(path)
        if path.stat().st_size > MOST_TOKENIZER_BYTES:
            raise CheckpointError(
                f"{path} has {path.stat().st_size:,} bytes; the limit for such a file is {MOST_TOKENIZER_BYTES:,}. "
                "Remove it from the folder."
            )
    return found


def find_notices(folder: Path, *, card: bool = True) -> dict[str, Path]:
    """Return the folder's licences and notices, with its model card unless that no longer describes the model.

    Files larger than any licence are skipped.
    """
    names = sorted(path.name for path in folder.iterdir() if is_notice(path.name))
    found = {
        name: resolve_weights_path(folder, name, named_by=folder) for name in names if not (folder / name).is_dir()
    }
    if not card:
        found = {name: path for name, path in found.items() if not name.lower().startswith(_CARD)}
    # Every checkpoint in a run has a copy of each.
    small = {name: path for name, path in found.items() if path.stat().st_size <= _MOST_NOTICE_BYTES}
    return dict(list(small.items())[:_MOST_NOTICES])


def read_notices(folder: Path) -> dict[str, bytes]:
    """Read licences and notices from the model that a run starts from; the run's own checkpoints keep them."""
    return {name: path.read_bytes() for name, path in find_notices(folder, card=False).items()}


def is_notice(name: str) -> bool:
    """Return True if a file name is a licence's, a notice's or a model card's."""
    return _NOTICE.fullmatch(name) is not None


def log_skipped_files(folder: Path, used: Iterable[str]) -> None:
    """Warn about files that a conversion leaves behind; ``used`` lists the converted files."""
    # By name, not by content: files with known names that are too large, and folders, are reported too.
    used = set(used).union(_NOT_NAMED)
    left: list[str] = []
    for path in sorted(folder.iterdir()):
        if path.name in used or (path.is_dir() and path.name.startswith(".")):
            continue
        if path.name == TEMPLATES and path.is_dir():
            left += [f"{TEMPLATES}/{inner.name}" for inner in sorted(path.iterdir())]
        else:
            left.append(path.name + "/" * path.is_dir())
    left = [name for name in left if name not in used]
    if left:
        named = format_names(map(printable, left))
        log.warning("%s: files left out, because longctx neither reads nor copies them: %s.", folder, named)


def log_ignored_keys(folder: Path, keys: Mapping[str, Any]) -> None:
    """Warn about config.json keys that do not affect the network; exports omit them."""
    if keys:
        named = format_names(f"{key}={shown(value)}" for key, value in keys.items())
        log.warning("%s/config.json: keys ignored, as in transformers, and left out of exports: %s.", folder, named)


def auxiliary_names(reader: CheckpointReader) -> list[str]:
    """Return a checkpoint's carried files, as its manifest lists them."""
    files = reader.manifest["files"]
    others = sorted(name for name in files if is_template(name) or is_notice(name) or name in PROCESSORS)
    return [name for name in COPIED_FILES if name in files] + others


def has_own_tokenizer(reader: CheckpointReader) -> bool:
    """Return True if a checkpoint carries Hugging Face tokenizer files, which are then exported unchanged."""
    return any(name in FAST_FILES for name in auxiliary_names(reader))


def copy_auxiliary_files(files: Mapping[str, Path], output: Path) -> list[str]:
    """Copy carried files into a Hugging Face folder, check the bytes, and return their paths there."""
    for name, path in files.items():
        copy = output / hf_path(name)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
        # A faulty disk may not raise an error.
        if copy.read_bytes() != path.read_bytes():
            raise CheckpointError(f"{name} in {output} reads back differently from the written data. Check the disk.")
    return [hf_path(name) for name in files]
