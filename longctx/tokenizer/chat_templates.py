"""Named chat templates: the files ``additional_chat_templates/NAME.jinja`` in a Hugging Face folder.

Shards and checkpoints have no subfolders; there such a file is ``additional_chat_templates.NAME.jinja``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from longctx.errors import DataError
from longctx.files import check_link

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,99}"
_IN_FOLDER = re.compile(rf"({_NAME})\.jinja")
_FLAT = re.compile(rf"{TEMPLATES}\.({_NAME})\.jinja")
_MOST = 64
"""Maximum templates per model; published models have two or three."""


def is_template(name: str) -> bool:
    """Return True if a file in shards or a checkpoint is a named chat template."""
    return _FLAT.fullmatch(name) is not None


def has_templates(files: Iterable[str]) -> bool:
    """Return True if files from shards or a checkpoint include a chat template."""
    return any(name == TEMPLATE_FILE or is_template(name) for name in files)


def find_template_files(folder: Path) -> dict[str, Path]:
    """Return a folder's templates by their names in a checkpoint.

    Raise DataError for a link out of the folder, and for more templates than a model has. Files with names that a
    checkpoint could not hold are left out.
    """
    found = {path.name: path for path in sorted(folder.glob(f"{TEMPLATES}.*.jinja")) if is_template(path.name)}
    # Hugging Face folders keep them in a subfolder.
    for path in sorted((folder / TEMPLATES).glob("*.jinja")):
        if _IN_FOLDER.fullmatch(path.name):
            found[f"{TEMPLATES}.{path.name}"] = path
    if len(found) > _MOST:
        raise DataError(f"{folder / TEMPLATES} has {len(found)} chat templates; at most {_MOST} are read.")
    for path in found.values():
        # Templates are copied into checkpoints: a link must not copy files from outside the folder.
        check_link(folder, str(path.relative_to(folder)))
    return {name: path for name, path in found.items() if path.is_file()}


def hf_path(name: str) -> str:
    """Return a checkpoint file's path in a Hugging Face folder: templates have their own subfolder."""
    match = _FLAT.fullmatch(name)
    if match is None:
        return name
    return f"{TEMPLATES}/{match[1]}.jinja"
