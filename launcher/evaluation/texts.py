"""Whole documents as ids, for losses: of shards the ids that they hold, of other text what the tokenizer makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data_pipeline.prepare.sources import open_source
from data_pipeline.shards.manifest import MANIFEST_FILE
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.verify import open_verified
from data_pipeline.stores.urls import Location
from launcher.checkpoint.tokenizers import check_same_tokenizer
from launcher.evaluation.options import Options
from launcher.evaluation.subject import Subject
from longctx.errors import DataError
from longctx.tokenizer.rows import check_rows


@dataclass(frozen=True)
class Text:
    """The beginning of a document."""

    name: str
    ids: np.ndarray
    """int32: a list of a million ids takes nine times the memory, on every rank."""


Texts = dict[int, list[Text]]
"""The texts of each length, every one cut to it."""


def read_documents(options: Options, subject: Subject) -> Texts:
    """For each length the first ``options.samples`` documents that are long enough; DataError where none is.

    Documents are never joined: what stands before another document's beginning is no context of it.
    """
    assert subject.text_folder is not None, "losses without text"
    found: Texts = {length: [] for length in options.lengths}
    longest = 0
    for name, ids in _documents(options, subject, subject.text_folder):
        longest = max(longest, len(ids))
        for length, texts in found.items():
            if len(ids) >= length and len(texts) < options.samples:
                check_rows(subject.tokenizer, ids[:length], f"{name} of {subject.text_folder}")
                # A copy: a view would hold the whole document.
                texts.append(Text(name, ids[:length].astype(np.int32)))
        if all(len(texts) == options.samples for texts in found.values()):
            break
    for length, texts in found.items():
        if not texts:
            raise DataError(
                f"--lengths {length}: the longest document of {subject.text_folder} has {longest:,} tokens, and a "
                f"loss at {length:,} needs one of {length:,}. Ask for --lengths {longest} or less, leave out ppl and "
                "longppl, or name longer texts: --haystack FOLDER"
            )
    return found


def _documents(options: Options, subject: Subject, folder: Location) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and ids of each document, with the ids that frame one."""
    if (folder / MANIFEST_FILE).is_file():
        shards = open_verified(folder)
        _check_tokenizer(options, subject, shards)
        for number in range(shards.num_documents):
            shards.check_files([number])
            yield shards.name(number), shards.document(number)
        return
    shortest, longest = min(options.lengths), 0
    for document in open_source(str(folder)):
        size = len(document.text.encode())
        # A token stands for a byte at least, begin, end and a first space apart: short texts need not be encoded. The
        # longest of them are: an error says how many tokens there are.
        if size + 3 >= shortest or size > longest:
            yield document.name, subject.tokenizer.encode_document(document.text)
        longest = max(longest, size)


def _check_tokenizer(options: Options, subject: Subject, shards: ShardSet) -> None:
    """DataError unless the shards' ids mean to the model what they say."""
    if options.tokenizer is None:
        check_same_tokenizer(subject.folder, shards)
    elif subject.tokenizer.fingerprint != shards.manifest.tokenizer:
        raise DataError(
            f"{shards.folder} was built with another tokenizer than {options.tokenizer}: ids would mean other text.\n"
            "Name the tokenizer that the data was built with, or a folder of plain text as --haystack."
        )
