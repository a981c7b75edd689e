"""Record type detection for a source, texts or conversations, if the user does not set it.

The files decide by agreement; if they disagree, an error asks the user. Training on other data as if it were text, or
on a conversation without its chat template, would raise no error. A few files that disagree with the others are ignored
as strays if they are small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from data_pipeline.prepare.joining import Join
from data_pipeline.prepare.readers.record_type import RecordType, detect_record_type, is_plain_text
from data_pipeline.prepare.source_items import PAIRS, Fields, File
from longctx.chat.conversation import FIELDS
from longctx.chat.preference import COMPARED, PREFERENCE_FIELDS, preference_kind_of
from longctx.errors import DataError

AUTO, PREFERENCES = "auto", COMPARED
FORMATS = (AUTO, "text", *FIELDS)
_DOCUMENTATION_NAMES = ("readme", "license", "licence", "copying", "notice", "citation", "changelog")
"""Prefixes of documentation files that come with any kind of data."""
_STRAY_SHARE = 0.01
"""Conversations with fewer bytes than this fraction of all texts' bytes are strays and left out."""


def find_fields(
    spec: str, files: Sequence[File], *, text_field: str, source_field: str, format: str, join: Join | None
) -> tuple[Fields, frozenset[str]]:
    """Return a source's document fields, and the names of files already known to contain a text in them.

    A ``source_field`` selects pairs, and the format ``preferences`` two replies or labelled ones, by the records'
    fields. Raises DataError if the files are ambiguous or options conflict.
    """
    if format == PREFERENCES:
        if source_field or join is not None or text_field != Fields().text:
            raise DataError("--source-field, --text-field and --join do not apply to preferences. Leave them out.")
        return Fields(kind=_preference_kind(spec, files)), frozenset()
    if format not in FORMATS:
        raise DataError(f"format={format!r} must be one of {', '.join(FORMATS)}.")
    if source_field:
        return _pairs(text_field, source_field, format=format, join=join), frozenset()
    texts, seen = Fields(text=text_field), frozenset()
    kind, is_default_field = format, text_field == Fields().text
    if kind == AUTO and is_default_field:
        looks = {file.name: detect_record_type(file, text_field) for file in files if file.format.kind != "text"}
        seen = frozenset(name for name, found in looks.items() if found.has_text)
        kind = _resolve_kind(spec, files, looks, text_field)
    # An explicit text field selects texts.
    if kind in (AUTO, "text"):
        return texts, seen
    if not is_default_field:
        raise DataError(
            f"--text-field {text_field} selects texts, but --format {kind} selects conversations. Leave one out."
        )
    if join is not None:
        raise DataError(
            f"source={spec} has conversations {describe_kind(kind)}, but --join directory joins texts. Leave it "
            "out, or read only texts with --format text."
        )
    return Fields(kind=kind), frozenset()


def _pairs(text_field: str, source_field: str, *, format: str, join: Join | None) -> Fields:
    """Return the fields for pairs; raise DataError for options that conflict with them."""
    if format not in (AUTO, "text") or join is not None:
        other = "--join directory joins texts" if join is not None else f"--format {format} selects conversations"
        raise DataError(f"--source-field {source_field} selects pairs, but {other}. Leave one out.")
    if source_field == text_field:
        raise DataError(
            f"--source-field {source_field} and --text-field {text_field} are the same field. Set one field for "
            "the source and another for the target."
        )
    return Fields(text=text_field, kind=PAIRS, source=source_field)


def describe_kind(kind: str) -> str:
    """Return the fields that identify a conversation type, for messages."""
    *names, last = map(repr, Fields(kind=kind).names)
    if not names:
        return f"by {last}"
    return f"by {', '.join(names)} and {last}"


def _preference_kind(spec: str, files: Sequence[File]) -> str:
    """Return the preference type that a source's files agree on; raise DataError if there is none, or several."""
    found: dict[str, str] = {}
    for file in files:
        if file.format.kind == "text":
            continue
        kind = detect_record_type(file, Fields().text, preference_kind_of).kind
        if kind:
            found.setdefault(kind, file.name)
    if len(found) == 1:
        return next(iter(found))
    if found:
        raise DataError(
            f"source={spec} contains preferences of two types.\n"
            + "\n".join(f"{name}: {describe_kind(kind)}" for kind, name in found.items())
            + "\nSelect the files of one type with --include or --exclude."
        )
    wanted = " or ".join(describe_kind(kind) for kind in PREFERENCE_FIELDS)
    raise DataError(f"source={spec} contains no preferences: records are known {wanted}.")


def _resolve_kind(spec: str, files: Sequence[File], looks: Mapping[str, RecordType], text_field: str) -> str:
    """Return the record type that a source's files agree on; raise DataError if they disagree."""
    # Conversations only win if every table agrees and plain texts are a minority by size. Any doubt is an error,
    # because a wrong choice would train without complaint.
    conversations = [file for file in files if file.name in looks and looks[file.name].kind]
    if not conversations:
        return "text"
    first, kind = conversations[0], looks[conversations[0].name].kind
    for file in conversations:
        if looks[file.name].has_text:
            other = looks[file.name].kind
            raise _doubt(
                spec, [f"{file.name}: text in {text_field!r}, and conversations {describe_kind(other)}"], other
            )
    # Check only now: a repository may have many plain files.
    tables = [file for file in files if file.name in looks and looks[file.name].has_text]
    plain = [file for file in files if file.name not in looks and not _is_documentation(file)]
    plain = [file for file in plain if is_plain_text(file, text_field)]
    if _size(conversations) < _STRAY_SHARE * _size(tables + plain):
        return "text"
    first_evidence = f"{first.name}: conversations {describe_kind(kind)}"
    for file in conversations:
        other = looks[file.name].kind
        if other != kind:
            raise _doubt(spec, [first_evidence, f"{file.name}: conversations {describe_kind(other)}"], kind)
    if tables or _size(conversations) < _size(plain):
        texts = tables + plain
        sizes = f"{_size(conversations):,} bytes of conversations, {_size(texts):,} bytes of text"
        raise _doubt(spec, [first_evidence, f"{texts[0].name}: text", sizes], kind)
    return kind


def _is_documentation(file: File) -> bool:
    """Return whether a file's name marks it as documentation, regardless of its length."""
    return file.name.rpartition("/")[2].lower().startswith(_DOCUMENTATION_NAMES)


def _size(files: Sequence[File]) -> int:
    """Return the files' total size on disk in bytes."""
    return sum(file.size for file in files)


def _doubt(spec: str, lines: Sequence[str], kind: str) -> DataError:
    """Build the error that asks the user to choose."""
    shown = "\n".join(lines)
    return DataError(
        f"source={spec} can be read in more than one way.\n{shown}\n"
        f"Choose with --format text or --format {kind}, or select the files to read with --include or --exclude."
    )
