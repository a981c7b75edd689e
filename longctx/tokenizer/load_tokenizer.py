"""``load_tokenizer``: load the tokenizer at any path that a user names."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longctx.errors import DataError
from longctx.files import CHECKPOINTS, MANIFEST, check_link, list_checkpoints, read_manifest_json
from longctx.tokenizer.chat_templates import find_template_files, is_template
from longctx.tokenizer.image_tokenizer import IMAGE_FILE, ImageTokenizer, is_image_format
from longctx.tokenizer.special import (
    GENERATION_CONFIG,
    JSON_FILE,
    MODEL_CONFIG,
    MODEL_FILE,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    read_tokenizer_json,
)
from longctx.tokenizer.tokenizer_base import Tokenizer
from longctx.untrusted.strict_json import NotFetchedError, read_bounded

TOKENIZER_FILES = (
    MODEL_FILE,
    JSON_FILE,
    TOKENIZER_CONFIG,
    SPECIAL_TOKENS_MAP,
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "tekken.json",
    IMAGE_FILE,
)
"""Tokenizer files in a Hugging Face folder, and the format of images."""
COPIED_FILES = (*TOKENIZER_FILES, GENERATION_CONFIG)
"""Files copied with shards and checkpoints, in addition to named chat templates (``templates``)."""
_OWN_FILES = (MODEL_FILE, JSON_FILE, IMAGE_FILE)
"""Files that define a tokenizer without any other one."""

MOST_TOKENIZER_BYTES = 256 * 2**20
"""Maximum size of a tokenizer file that is read; the largest published ones have some 35 MB."""

_FORMS = (
    "It may be a SentencePiece model (F.model), a tokenizer.json, a Hugging Face folder, a checkpoint, a run folder "
    "or a shard folder; for images an image.json."
)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer at ``path``: a SentencePiece model, a tokenizer.json, an image.json, or a folder with one.

    The folder may be Hugging Face's, a checkpoint, a run (its newest checkpoint) or a shard folder. Begin and end ids
    come from the files next to the tokenizer. Raise ``DataError`` if the tokenizer is missing or damaged.
    """
    path = Path(path)
    if path.is_dir():
        return _load_folder(path)
    content = _read(path)
    folder_files: dict[str, bytes] = {}
    # Settings in a model's own folder apply; a file with another name is used alone.
    if path.name in (MODEL_FILE, JSON_FILE):
        folder_files = _read_folder_files(
            path.parent, [name for name in COPIED_FILES if name not in (MODEL_FILE, JSON_FILE)]
        )
    # Decide by content: the file may have any name.
    if is_image_format(content):
        return ImageTokenizer(content, path=path)
    if content.lstrip()[:1] == b"{":
        return _load_json(content, path, folder_files)
    return _load_model(content, path, folder_files)


def is_tokenizer_file(name: str) -> bool:
    """Return True if a file in shards or a checkpoint belongs to the tokenizer."""
    return name in COPIED_FILES or is_template(name)


def has_tokenizer(folder: Path) -> bool:
    """Return True if a folder holds a tokenizer that ``load_tokenizer`` reads."""
    return any((folder / name).is_file() for name in _OWN_FILES)


def fingerprints(folder: str | Path) -> dict[str, str]:
    """Return fingerprints by file for each tokenizer in a folder: a model may have tokenizer.json and .model."""
    folder = Path(folder)
    # Keyed by fingerprint first: equal tokenizers appear once.
    found = {load_tokenizer(folder).fingerprint: str(folder)}
    for name in _OWN_FILES:
        if (folder / name).is_file():
            found[load_tokenizer(folder / name).fingerprint] = str(folder / name)
    return {file: fingerprint for fingerprint, file in found.items()}


def generation_settings(folder: Path) -> bytes | None:
    """Return a folder's generation_config.json, if it has one; raise DataError for a link that leads out of it."""
    if (folder / GENERATION_CONFIG).is_symlink():
        check_link(folder, GENERATION_CONFIG)
    return _bytes_or_none(folder / GENERATION_CONFIG)


def same_files(folder: Path, other: Path) -> bool:
    """Return True if all files that affect ids are equal in two folders, so that comparing them needs no loading."""
    names = (*_OWN_FILES, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, GENERATION_CONFIG)
    return all(_bytes_or_none(folder / name) == _bytes_or_none(other / name) for name in names)


def _bytes_or_none(path: Path) -> bytes | None:
    if not path.is_file():
        return None
    return _read(path)


def _load_folder(folder: Path) -> Tokenizer:
    """Load the tokenizer in a folder; for a run, its newest checkpoint's."""
    if not has_tokenizer(folder) and (folder / CHECKPOINTS).is_dir():
        checkpoints = list_checkpoints(folder)
        if not checkpoints:
            raise DataError(
                f"tokenizer={folder} is a run without a checkpoint. Give another run, or its data's folder."
            )
        folder = checkpoints[-1]
    files = _read_folder_files(folder, COPIED_FILES)
    files |= {name: _read(path) for name, path in find_template_files(folder).items()}
    if not any(name in files for name in _OWN_FILES):
        raise DataError(f"tokenizer={folder}: {_why_none(folder)}")
    return load_files(files, folder)


def load_files(files: Mapping[str, bytes], folder: Path) -> Tokenizer:
    """Load the tokenizer from these files; messages use ``folder`` as their location."""
    files = dict(files)
    # Our own export has both files, and the model file is exact.
    if MODEL_FILE in files and JSON_FILE in files:
        model = _load_own_model(files, folder)
        if model is not None:
            return model
    if JSON_FILE in files:
        return _load_json(files.pop(JSON_FILE), folder, files)
    # Last: another program's image.json next to a text tokenizer has no meaning here.
    if MODEL_FILE not in files and IMAGE_FILE in files:
        return ImageTokenizer(files[IMAGE_FILE], path=folder)
    return _load_model(files.pop(MODEL_FILE), folder, files)


def _load_own_model(files: Mapping[str, bytes], folder: Path) -> Tokenizer | None:
    """Return our own model if the tokenizer.json is an export from it; otherwise None: the tokenizer.json applies."""
    from longctx.tokenizer.sentencepiece_model import SentencePieceTokenizer

    folder_files = {name: content for name, content in files.items() if name != MODEL_FILE}
    try:
        tokenizer = SentencePieceTokenizer(files[MODEL_FILE], path=folder, folder_files=folder_files)
    except DataError:
        # A tokenizer.model next to a tokenizer.json may be from another library (Llama 3 has tiktoken's).
        return None
    if tokenizer.is_own:
        return tokenizer
    return None


def _load_json(content: bytes, path: Path, folder_files: Mapping[str, bytes]) -> Tokenizer:
    """Load a tokenizer.json."""
    # Import on demand: each library is needed for one form only.
    from longctx.tokenizer.fast import FastTokenizer

    return FastTokenizer(content, path=path, folder_files=folder_files)


def _load_model(content: bytes, path: Path, folder_files: Mapping[str, bytes]) -> Tokenizer:
    """Load a SentencePiece model; raise DataError for files that are mistaken for one."""
    from longctx.tokenizer.sentencepiece_model import SentencePieceTokenizer

    if _is_tiktoken(content):
        raise DataError(
            f"tokenizer={path} is a tiktoken file, which does not define how text is split. Use the same model's "
            "tokenizer.json."
        )
    tokenizer = SentencePieceTokenizer(content, path=path, folder_files=folder_files)
    _check_added_tokens(tokenizer, folder_files, path)
    return tokenizer


def _is_tiktoken(content: bytes) -> bool:
    """Return True if a file starts like tiktoken's: a token in base64, a space, its rank."""
    parts = content[:400].split(b"\n")[0].split(b" ")
    return len(parts) == 2 and parts[1].strip().isdigit()


def _check_added_tokens(tokenizer: Tokenizer, folder_files: Mapping[str, bytes], path: Path) -> None:
    """Raise DataError for added tokens that text could become but that are missing from the model file."""
    added = read_tokenizer_json(folder_files, TOKENIZER_CONFIG, path).get("added_tokens_decoder", {})
    missing = [entry for number, entry in added.items() if int(number) >= tokenizer.vocab_size]
    plain = [entry["content"] for entry in missing if not entry.get("special")]
    if plain:
        raise DataError(
            f"tokenizer={path} has {len(plain)} added tokens, {plain[0]!r} among them, missing from its {MODEL_FILE}.\n"
            "Write a tokenizer.json first: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)."
        )


def _read_folder_files(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Read these files from a folder, and the settings that name begin and end ids.

    Raise DataError for links out of the folder: files are copied into shards and checkpoints, and a folder may be
    untrusted.
    """
    files: dict[str, bytes] = {}
    for name in (*names, MODEL_CONFIG):
        path = folder / name
        # A dangling link is not a file; skipping it could change begin and end.
        if path.is_symlink():
            check_link(folder, name)
        if path.is_file():
            files[name] = _read(path)
    # A checkpoint has no config.json; an imported one has the ids in its manifest.
    if MODEL_CONFIG not in files and (folder / MANIFEST).is_file():
        ids = _imported_ids(folder)
        if ids:
            files[MODEL_CONFIG] = json.dumps(ids).encode()
    return files


def _imported_ids(folder: Path) -> dict[str, Any]:
    """Return the config.json ids of an imported checkpoint; empty for any other manifest."""
    # A damaged manifest is reported when the checkpoint is read: only its tokenizer is needed here.
    with contextlib.suppress(ValueError, OSError, LookupError, TypeError):
        ids = read_manifest_json(folder)["training"]["imported"]["token_ids"]
        if isinstance(ids, dict):
            return ids
    return {}


def _read(path: Path) -> bytes:
    try:
        return read_bounded(path, MOST_TOKENIZER_BYTES)
    except NotFetchedError as error:
        raise DataError(f"tokenizer={path} cannot be read: {error}.") from error
    except (OSError, ValueError) as error:
        reason = error
        if isinstance(error, OSError):
            reason = error.strerror
        raise DataError(
            f"tokenizer={path} cannot be read ({reason}). {_FORMS}\n"
            "Train one with `longctx tokenizer train --source … --vocab-size … --output …`."
        ) from error


def _why_none(folder: Path) -> str:
    """Return why a folder has no tokenizer that we read, with advice."""
    if (folder / "tekken.json").is_file():
        return "it has a tekken.json. Use the tokenizer.json from the model's Hugging Face version."
    for name in ("vocab.json", "vocab.txt"):
        if (folder / name).is_file():
            how = "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            return f"it has a {name} but no tokenizer.json. Write one: {how}."
    return f"the folder contains no tokenizer. {_FORMS}"
