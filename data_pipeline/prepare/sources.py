"""Text sources: the interpreter's standard library, folders, and text, JSON, CSV, Parquet and Arrow files.

Documents come in a fixed order: by relative path, then by line or row. Skipped records are counted by reason and
listed.
"""

from __future__ import annotations

import json
import logging
import platform
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from data_pipeline.prepare.detect_format import AUTO, FORMATS, describe_kind, find_fields
from data_pipeline.prepare.joining import Join, cut_directories, join_pieces
from data_pipeline.prepare.left_out import LeftOut
from data_pipeline.prepare.listing import Selection, list_files, list_source
from data_pipeline.prepare.readers.file_pieces import CUT_BYTES, hash_and_cut
from data_pipeline.prepare.readers.parallel_text import match_pairs
from data_pipeline.prepare.readers.plain_text import JSON_WITHOUT_SUFFIX
from data_pipeline.prepare.readers.read_files import ACCESS_ERROR, check_file
from data_pipeline.prepare.readers.records import NO_CONVERSATION, no_field_reason
from data_pipeline.prepare.source_items import PAIRS, READABLE, Document, Fields, File, FilePiece, Skip, full_piece
from data_pipeline.prepare.source_reader import ANY_LENGTH, Lengths, ReadAs, SourceReader, strict_read_error
from data_pipeline.stores.client import list_names
from data_pipeline.stores.urls import Location, ObjectPath, locate
from longctx.chat.preference import COMPARED, PREFERENCE_FIELDS
from longctx.errors import DataError

logger = logging.getLogger(__name__)

# Formats read in the same way since the first release: a fingerprint without a format means these.
_FIRST_FORMATS = ("", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
_SHOWN_FILES = 3


class TextSource:
    """A corpus that can be read repeatedly, always in the same order; see ``open_source``."""

    def __init__(
        self,
        spec: str,
        *,
        kind: str,
        files: list[File],
        left_out: list[Skip],
        fields: Fields,
        selection: Selection,
        strict: bool,
        join: Join | None = None,
        lengths: Lengths = ANY_LENGTH,
    ) -> None:
        self.spec = spec
        self.kind = kind
        self.left_out = LeftOut(left_out)
        """Skips, with the first names per reason; complete after one full read."""
        self.bytes_read = 0
        """Bytes on disk that reading has passed, out of ``num_bytes``."""
        self._files = files
        self.listing_skipped = tuple(left_out)
        """Skips recorded before anything was read."""
        self.fields = fields
        """Record type, and the fields that contain its text."""
        self.read_as = ReadAs(spec=spec, fields=fields, strict=strict, lengths=lengths)
        self._selection = selection
        self._join = join
        self._fingerprint: dict[str, Any] | None = None
        self._pieces: list[FilePiece] = []

    def __iter__(self) -> Iterator[Document]:
        """Yield every document, as ``read`` does."""
        return self.read()

    def read(self, on_left_out: Callable[[Skip], None] | None = None) -> Iterator[Document]:
        """Yield every document; call ``on_left_out`` for every skip, starting with those from the listing.

        A damaged file or record is skipped, or raises ``DataError`` with ``strict``. A source without any text raises
        ``DataError`` at the end.
        """
        num_documents = self.bytes_read = 0
        reader = SourceReader(self.read_as, on_left_out)
        for skip in self.listing_skipped:
            reader.note(skip)
        # One file piece per file: cuts only matter to parallel builds.
        for document in reader.documents(self._joined(map(full_piece, self._files))):
            num_documents += 1
            self.bytes_read = reader.bytes_read
            yield document
        self.bytes_read = reader.bytes_read
        # Update only now, so that an interrupted read leaves no partial count.
        self.left_out = reader.left_out
        if not num_documents:
            raise DataError(self.no_documents())

    def no_documents(self) -> str:
        """Return the error message for a source that gave no documents."""
        return no_text(self.spec, self.left_out)

    def pieces(self) -> list[FilePiece]:
        """Return the files in order, with large ones split into file pieces of complete records if their format permits
        it.

        The result depends only on the files and the join rule. The files are read once for it, together with
        ``fingerprint``.
        """
        self.fingerprint()
        return list(self._pieces)

    def cut_directories(self) -> dict[str, int]:
        """Count the documents per directory, for directories too large to be joined into one document."""
        if self._join is None:
            return {}
        return cut_directories(self._joined(map(full_piece, self._files)), self._join)

    @property
    def skipped(self) -> dict[str, int]:
        """Skipped folders, files, lines or rows by reason; complete after one full read."""
        return dict(sorted(self.left_out.counts.items()))

    @property
    def num_files(self) -> int:
        """Number of files to read."""
        return len(self._files)

    @property
    def num_bytes(self) -> int:
        """Total size of these files on disk in bytes."""
        return sum(file.size for file in self._files)

    def stamp(self) -> dict[str, Any]:
        """Return an identifier that needs no reading: the files' names, sizes and modification times.

        Suitable for results that can be recomputed if it is wrong; shard folders use ``fingerprint`` instead.
        """
        listing = _listing_hash(self._files)
        if listing is None:
            return self.fingerprint()
        return {"kind": self.kind, **self._read_as(), "listing_xxh3_128": listing}

    def fingerprint(self, progress: Callable[[int], object] | None = None) -> dict[str, Any]:
        """Return the corpus identity as JSON values, the same on every machine with the same files.

        ``files_xxh3_128`` covers each file's relative path, size and content, but neither absolute paths nor dates. The
        files are read once for it, far faster than they are tokenized; ``progress`` receives the bytes so far.
        """
        if self._fingerprint is None:
            digest = xxhash.xxh3_128()
            done = 0
            pieces: list[FilePiece] = []
            for file in self._files:
                content, cut = _hash(file)
                pieces += cut
                digest.update(json.dumps([file.name, file.size, content]).encode())
                done += file.size
                if progress is not None:
                    progress(done)
            # The read that hashes the files also finds the cuts, so they cost no second pass.
            self._pieces = list(self._joined(pieces))
            self._fingerprint = {
                "kind": self.kind,
                **self._read_as(),
                "exclude": list(self._selection.exclude),
                "files": self.num_files,
                "bytes": self.num_bytes,
                "files_xxh3_128": digest.hexdigest(),
            }
        return dict(self._fingerprint)

    def _joined(self, pieces: Iterable[FilePiece]) -> Iterable[FilePiece]:
        if self._join is None:
            return pieces
        return join_pieces(pieces, self._join)

    def _read_as(self) -> dict[str, Any]:
        """Return the options for reading the files; other options make other documents from the same bytes."""
        if self.kind == "stdlib":
            # The standard library differs between interpreters, so the version identifies its text.
            read_as: dict[str, Any] = {"interpreter": f"{platform.python_implementation()} {platform.python_version()}"}
        else:
            read_as = self.fields.to_json()
        # Record only non-default options, so that folders built by older releases are still up to date.
        for name in ("include", "as_text", "as_json"):
            if patterns := getattr(self._selection, name):
                read_as[name] = list(patterns)
        if self._join is not None:
            read_as["join"] = self._join.to_json()
        read_as |= self.read_as.lengths.to_json()
        formats = Counter(file.format.ending for file in self._files if file.format.ending not in _FIRST_FORMATS)
        if formats:
            read_as["formats"] = dict(sorted(formats.items()))
        # Older releases read TSV files as CSV, and so as other documents.
        if any(file.format.kind == "tsv" for file in self._files):
            read_as["tsv"] = "a line is a row"
        return read_as


def _listing_hash(files: Sequence[File]) -> str | None:
    """Hash the files' names, sizes and times; None for files in a store, where times are unreliable."""
    digest = xxhash.xxh3_128()
    for file in [side for one in files for side in (one, one.other) if side is not None]:
        if not isinstance(file.path, Path):
            return None
        try:
            status = file.path.stat()
        except OSError as error:
            raise DataError(_read_error(file, error)) from error
        digest.update(json.dumps([file.name, status.st_size, status.st_mtime_ns, file.format.ending]).encode())
    return digest.hexdigest()


def open_source(
    spec: str | Path,
    *,
    text_field: str = "text",
    source_field: str = "",
    format: str = AUTO,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    as_text: Sequence[str] = (),
    as_json: Sequence[str] = (),
    strict: bool = False,
    join: Join | None = None,
    lengths: Lengths = ANY_LENGTH,
) -> TextSource:
    """Open the corpus at ``spec``: list and check its files without reading them completely.

    ``"stdlib"`` is the running interpreter's standard library as Python source. Otherwise ``spec`` is a path or an
    object store URL (``s3://``, ``gs://``), either a folder (read recursively, linked folders once, without hidden
    files) or a file: text, JSON, JSON Lines, CSV, Parquet, Arrow, also compressed, with the text in ``text_field``, or
    with conversations.

    With a ``source_field`` records are pairs, and ``text_field`` contains the target. ``format`` selects the record
    type: ``"text"``, a conversation type (``messages``, ``conversations`` or ``prompt``), ``"preferences"``, or
    ``"auto"``: the type of text or conversation that the files agree on. ``include``, ``exclude``, ``as_text`` and
    ``as_json`` (files to read as plain text or as JSON whatever their suffix) take glob patterns on relative paths;
    ``*`` also crosses folders, and a folder's own path stands for everything below it. Unreadable files and records are
    skipped and listed, or raise an error with ``strict``. A text file is one document, or with ``join`` a directory's
    text files are joined into one. Documents outside ``lengths`` are skipped and listed.

    Every file's schema or first records are checked here. Raises ``DataError`` if there is nothing to read, if it is
    ambiguous whether the files contain conversations, or if most of the source lacks the requested fields and no other
    file has them.
    """
    kind, root = locate_source(spec)
    selection = Selection(include=include, exclude=exclude, as_text=as_text, as_json=as_json)
    # A store has no links to follow.
    if isinstance(root, ObjectPath):
        listing = list_source(root, selection)
    else:
        listing = list_files(root, selection, python_only=kind == "stdlib")
    unused = selection.unused()
    if unused:
        logger.warning("%s: pattern %s matches no file", spec, ", ".join(map(repr, unused)))
    fields, with_text = find_fields(
        str(spec), listing.files, text_field=text_field, source_field=source_field, format=format, join=join
    )
    candidates = listing.files
    if fields.kind == PAIRS:
        candidates = match_pairs(candidates, fields)
    # Skip files that ``find_fields`` has already opened.
    results = [(file, None if file.name in with_text else check_file(file, fields)) for file in candidates]
    files = [file for file, problem in results if problem is None]
    problems = [problem for _, problem in results if problem is not None]
    left_out = listing.left_out + problems
    faults = [skip for skip in left_out if skip.is_fault]
    if strict and faults:
        raise DataError(strict_read_error(str(spec), faults[0]))
    _check_fields(str(spec), fields, files=files, candidates=candidates, problems=problems)
    _check_json_suffixes(str(spec), files=files, candidates=candidates, problems=problems)
    if not files:
        raise DataError(no_text(str(spec), LeftOut(left_out)))
    if problems:
        lines = LeftOut(problems).lines()
        logger.warning("%s: left out %s", spec, "; ".join(lines))
    not_read = [problem for file, problem in results if problem is not None and not _is_read(file, problem)]
    return TextSource(
        str(spec),
        kind=kind,
        files=[file for file, problem in results if _is_read(file, problem)],
        left_out=listing.left_out + not_read,
        fields=fields,
        selection=selection,
        strict=strict,
        join=join,
        lengths=lengths,
    )


def _is_read(file: File, problem: Skip | None) -> bool:
    """Return whether the source reads a file, given the result of ``check_file``.

    Non-text files pass here and are skipped while reading: files in a store are not checked, since each check costs a
    request, and a source must be the same at any location.
    """
    return problem is None or (file.format.kind == "text" and problem.reason != ACCESS_ERROR)


def _check_fields(
    spec: str, fields: Fields, *, files: list[File], candidates: list[File], problems: list[Skip]
) -> None:
    """Raise ``DataError`` if the fields are probably wrong: no file has them, and most data would be skipped."""
    reasons = [no_field_reason(field) for field in fields.names]
    if fields.kind not in ("text", PAIRS):
        reasons.append(NO_CONVERSATION)
    faulty = _describe_faulty(reasons, files=files, candidates=candidates, problems=problems)
    if not faulty or any(file.format.kind != "text" for file in files):
        return
    if fields.kind == "text":
        raise DataError(
            f"source={spec} has no text in field {fields.text!r}.\n{faulty}\n"
            "Set the correct field with --text-field (text_field), leave such files out with --exclude, "
            f"or read them as plain text with --as-text.{_preference_hint(faulty)}"
        )
    if fields.kind == PAIRS:
        raise DataError(
            f"source={spec} has no pairs in fields {fields.source!r} (source) and {fields.text!r} (target).\n{faulty}\n"
            "Set the correct fields with --source-field and --text-field, or leave such files out with --exclude."
        )
    if fields.kind in PREFERENCE_FIELDS:
        raise DataError(f"source={spec} has no usable preferences {describe_kind(fields.kind)}.\n{faulty}")
    raise DataError(
        f"source={spec} has no conversations {describe_kind(fields.kind)}.\n{faulty}\n"
        f"Set the record type with --format ({', '.join(FORMATS)}), or leave such files out with --exclude."
    )


def _preference_hint(faulty: str) -> str:
    """Return how to read preferences, if the faulty files' fields look like them."""
    if not all(repr(name) in faulty for name in PREFERENCE_FIELDS[COMPARED]):
        return ""
    return "\nRecords with chosen and rejected replies are preferences: --kind preferences."


def _check_json_suffixes(spec: str, *, files: list[File], candidates: list[File], problems: list[Skip]) -> None:
    """Raise ``DataError`` if most of the source is JSON records in files without a JSON suffix."""
    faulty = _describe_faulty([JSON_WITHOUT_SUFFIX], files=files, candidates=candidates, problems=problems)
    if faulty:
        raise DataError(
            f"source={spec} has JSON in files without a JSON suffix.\n{faulty}\n"
            "Select such files by a pattern, as in --as-json '*', or leave them out with --exclude."
        )


def _describe_faulty(reasons: Sequence[str], *, files: list[File], candidates: list[File], problems: list[Skip]) -> str:
    """Return the names of files with these faults, if they make up more than half the bytes."""
    without = {skip.name: skip for skip in problems if skip.is_fault and skip.reason in reasons}
    faulty_bytes = sum(file.size for file in candidates if file.name in without)
    # A stray table in a code repository is no reason to stop.
    if faulty_bytes <= sum(file.size for file in files):
        return ""
    shown = [f"{skip.name}: {skip.detail}" for skip in list(without.values())[:_SHOWN_FILES]]
    if len(without) > _SHOWN_FILES:
        shown.append(f"… and {len(without) - _SHOWN_FILES} more files")
    return "\n".join(shown)


# --------------------------------------------------------------------------------------------------------- locations


def locate_source(spec: str | Path) -> tuple[str, Location]:
    """Return the kind and location of a source; raise ``DataError`` if it does not exist."""
    if spec == "stdlib":
        return "stdlib", Path(sysconfig.get_path("stdlib"))
    path = locate(spec)
    # Each query to a store is a request, so the one for a folder comes last.
    if path.is_file():
        return "file", path
    if path.is_dir():
        return "folder", path
    if isinstance(path, ObjectPath) or not path.exists():
        raise DataError(f"source={spec} does not exist.\n{_nearest(path)}")
    return "file", path


def _nearest(path: Location) -> str:
    """Suggest alternatives to a missing location: the contents of its deepest existing parent folder."""
    if isinstance(path, ObjectPath):
        parent: Location = path.parent
        names = list_names(parent)
    else:
        parent = next((p for p in path.absolute().parents if p.is_dir()), Path("/"))
        try:
            names = sorted(p.name for p in parent.iterdir() if not p.name.startswith("."))
        except OSError:
            names = []
    held = ", ".join(names[:8]) or "nothing"
    return f'{parent} contains {held}. Name a file or folder, or "stdlib" for the text of Python\'s standard library.'


# ---------------------------------------------------------------------------------------------------------- messages


def no_text(spec: str, left_out: LeftOut) -> str:
    """Return the error message for a source without documents."""
    reasons = "\n".join(f"  {line}" for line in left_out.lines()) or "  it is empty"
    return f'source={spec} contains no usable text:\n{reasons}\nUse {READABLE}; or "stdlib", which every Python has.'


def _hash(file: File) -> tuple[str, list[FilePiece]]:
    try:
        content, pieces = hash_and_cut(file, CUT_BYTES)
        if file.other is not None:
            content += hash_and_cut(file.other, CUT_BYTES)[0]
        return content, pieces
    except OSError as error:
        raise DataError(_read_error(file, error)) from error


def _read_error(file: File, error: OSError) -> str:
    return f"{file.path} cannot be read ({error.strerror}). Repair it or exclude {file.name!r}."
