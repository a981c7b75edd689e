"""Where text comes from: the interpreter's own standard library, folders, text files, JSON Lines, Parquet.

Documents come in a fixed order: by relative path, then by line or row. What is left out is counted by reason.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from data_pipeline.prepare.documents import Document, File, Skip
from data_pipeline.prepare.readers import read
from longctx.errors import DataError
from longctx.files import hash_file

logger = logging.getLogger(__name__)

_NEVER = {"site-packages", "dist-packages", "__pycache__"}


class Source:
    """A corpus that can be read again and again, always in the same order. ``open_source`` makes it."""

    def __init__(
        self,
        spec: str,
        *,
        kind: str,
        files: list[File],
        text_field: str,
        exclude: Sequence[str],
        left_out: Counter[str],
    ) -> None:
        self.spec = spec
        self.kind = kind
        self._files = files
        self._text_field = text_field
        self._exclude = tuple(exclude)
        self._left_out = left_out
        self._skipped = Counter(left_out)
        self._fingerprint: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Document]:
        """Yield every document; raise ``DataError`` at a damaged file, or at the end if there was no text at all."""
        skipped = Counter(self._left_out)
        num_documents = 0
        for file in self._files:
            for item in read(file, self._text_field):
                if isinstance(item, Skip):
                    logger.info("left out %s: %s", item.name, item.reason)
                    skipped[item.reason] += 1
                else:
                    num_documents += 1
                    yield item
        # Only now, so that a reading that was broken off leaves no half count.
        self._skipped = skipped
        if not num_documents:
            raise DataError(_no_text(self.spec, skipped))

    @property
    def skipped(self) -> dict[str, int]:
        """Number of files, lines or rows that were left out, by reason; complete after one full reading."""
        return dict(sorted(self._skipped.items()))

    @property
    def num_files(self) -> int:
        """Files that are read."""
        return len(self._files)

    @property
    def num_bytes(self) -> int:
        """Size of those files on disk."""
        return sum(file.size for file in self._files)

    def fingerprint(self) -> dict[str, Any]:
        """What the corpus is, JSON-able and the same on every machine that has the same files.

        ``files_xxh3_128`` covers each file's relative path, size and content; absolute paths and dates are not in it.
        The files are read once for this, which takes far less time than tokenizing them.
        """
        if self._fingerprint is None:
            digest = xxhash.xxh3_128()
            for file in self._files:
                digest.update(json.dumps([file.name, file.size, _hash(file)]).encode())
            # How the files are read belongs to it: the same bytes are other documents under another field.
            if self.kind == "stdlib":
                read_as = {"interpreter": f"{platform.python_implementation()} {platform.python_version()}"}
            else:
                read_as = {"text_field": self._text_field}
            self._fingerprint = {
                "kind": self.kind,
                **read_as,
                "exclude": list(self._exclude),
                "files": self.num_files,
                "bytes": self.num_bytes,
                "files_xxh3_128": digest.hexdigest(),
            }
        return dict(self._fingerprint)


def open_source(spec: str | Path, *, text_field: str = "text", exclude: Sequence[str] = ()) -> Source:
    """The corpus that ``spec`` names, listed but not yet read.

    ``"stdlib"`` is the Python source of the running interpreter's standard library; anything else is a path: a folder
    (read recursively, hidden files left out), a text file, ``.jsonl`` (also ``.gz``, ``.zst``) or ``.parquet`` with
    the text in ``text_field``. ``exclude`` takes glob patterns on relative paths, where ``*`` also crosses folders and
    a folder's own path leaves out all below it. Raises ``DataError`` if there is nothing to read.
    """
    kind, root = _locate(str(spec))
    left_out: Counter[str] = Counter()
    found = _list_files(root, python_only=kind == "stdlib", left_out=left_out)
    # A pattern without a match is most often a typing error.
    unused = [pattern for pattern in exclude if not any(_matches(file.name, pattern) for file in found)]
    if unused:
        logger.warning("%s: exclude pattern %s matches no file", spec, ", ".join(map(repr, unused)))
    files = [file for file in found if not any(_matches(file.name, pattern) for pattern in exclude)]
    left_out["excluded"] += len(found) - len(files)
    # A Counter's plus sign drops zero counts.
    left_out = +left_out
    if not files:
        raise DataError(_no_text(str(spec), left_out))
    return Source(str(spec), kind=kind, files=files, text_field=text_field, exclude=exclude, left_out=left_out)


# ---------------------------------------------------------------------------------------------------- listing files


def _locate(spec: str) -> tuple[str, Path]:
    """Kind and path of what a user named; ``DataError`` if there is nothing."""
    if spec == "stdlib":
        return "stdlib", Path(sysconfig.get_path("stdlib"))
    path = Path(spec)
    if not path.exists():
        raise DataError(f"source={spec} does not exist.\n{_nearest(path)}")
    if path.is_dir():
        return "folder", path
    return "file", path


def _nearest(path: Path) -> str:
    """Advice for a path that is not there: the deepest parent that is, and what it holds."""
    parent = next((p for p in path.absolute().parents if p.is_dir()), Path("/"))
    try:
        names = sorted(p.name for p in parent.iterdir() if not p.name.startswith("."))[:8]
    except OSError:
        names = []
    held = ", ".join(names) or "nothing"
    return f'{parent} holds {held}. Name a file or folder with text, or "stdlib" for Python\'s standard library.'


def _list_files(root: Path, *, python_only: bool, left_out: Counter[str]) -> list[File]:
    """Files below ``root`` by relative path; a file given itself is the whole list."""
    if root.is_file():
        return [File(root, root.name, root.stat().st_size)]
    files: list[File] = []
    for folder, folders, names in os.walk(root, onerror=_unreadable):
        if python_only:
            entered = [name for name in folders if name not in _NEVER]
        else:
            entered = [name for name in folders if not name.startswith(".")]
            left_out["hidden"] += len(folders) - len(entered)
        # os.walk goes into those alone that its list still holds.
        folders[:] = entered
        for name in names:
            path = Path(folder, name)
            if python_only and path.suffix != ".py":
                continue
            if name.startswith(".") and not python_only:
                left_out["hidden"] += 1
            elif not path.is_file():
                left_out["not a regular file"] += 1
            else:
                files.append(File(path, path.relative_to(root).as_posix(), path.stat().st_size))
    # File systems list in any order; documents and their shards must not depend on it.
    return sorted(files, key=lambda file: file.name)


def _unreadable(error: OSError) -> None:
    raise DataError(
        f"{error.filename} cannot be read ({error.strerror}). Mend its permissions or exclude it."
    ) from error


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern names a file, or a folder above it."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, pattern.rstrip("/") + "/*")


def _no_text(spec: str, skipped: Counter[str]) -> str:
    """The message about a source without a document."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items())) or "it is empty"
    return (
        f"source={spec} holds no text that can be used ({reasons}).\n"
        'Give UTF-8 text files, .jsonl (also .gz, .zst) or .parquet; or "stdlib", which every Python has.'
    )


def _hash(file: File) -> str:
    try:
        return hash_file(file.path)
    except OSError as error:
        raise DataError(f"{file.path} cannot be read ({error.strerror}). Mend it or exclude {file.name!r}.") from error
