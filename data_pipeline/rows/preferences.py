"""Preferences: a prompt with two replies that a model learns to tell apart (DPO and its relatives), in packed rows.

A record is never cut, and takes consecutive documents in one row, in one of two forms:

    copied    [prompt first] [prompt second]              two documents, each with its own copy of the prompt
    shared    [prompt but its last token] [last first] [last second]      the prompt once, as the others' prefix

In the shared form the prompt is computed once: both replies see it, and their positions follow it. A reply's first
token is predicted from the prompt's last one, so each reply has a copy of that token. A prompt of one token needs no
prefix. In both forms the tokens that predict a reply's tokens count, and documents other than prefixes and padding
alternate: first, second, first, second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from data_pipeline.rows.pack import Piece, Row
from data_pipeline.shards.reader import Corpus, ShardSet
from longctx.errors import ConfigError

_WHOLE = 1 << 40
"""Piece length above any record, so that no record is cut."""
_KNOWN_RECORDS = 1 << 16
"""Records with sizes in memory, about 200 bytes each; beyond that they are read again."""
_DOCUMENTS = 3
"""Document numbers per record: 3n is its prefix, 3n + 1 its first reply, 3n + 2 the second."""
_PREFIX, _FIRST, _SECOND = range(_DOCUMENTS)


@dataclass(frozen=True)
class PreferenceRule:
    """Rule for the documents that a record becomes."""

    shared_prompts: bool = False
    """True if both replies of a record share one copy of its prompt, which needs all tokens of a row on one rank."""
    least_tokens, has_segments, has_labels, pixel_bytes = 1, False, True, 0

    def __str__(self) -> str:
        """Return the rule as recorded in the loader state."""
        if self.shared_prompts:
            return "preferences with shared prompts"
        return "preferences"

    def tokens_in_rows(self, prompt_lengths: np.ndarray, reply_lengths: np.ndarray) -> np.ndarray:
        """Return the row tokens that records take, given the tokens of their prompts and of both replies together."""
        if self.shared_prompts:
            # Both replies have a copy of the prompt's last token.
            return prompt_lengths + reply_lengths + 1
        return 2 * prompt_lengths + reply_lengths

    def lengths(self, lengths: np.ndarray) -> np.ndarray:
        """Return the lengths unchanged: rows are planned with ``tokens_in_rows``."""
        return lengths

    def source_lengths(self, lengths: np.ndarray) -> None:
        """Return None: a record has no encoder input."""

    def most_tokens(self, seq_len: int, source_seq_len: int) -> int:
        """Return a length above any record: a record that does not fit into a row is dropped, not cut."""
        return _WHOLE


class PreferenceReplies:
    """Records in some folders as documents; ``rows`` gives the rows that contain them."""

    is_masked = True

    def __init__(self, rule: PreferenceRule, folders: Sequence[ShardSet]) -> None:
        """Initialize; raise ConfigError if a folder contains no preferences, or other ones than the first."""
        for shards in folders:
            check_preferences(shards)
            if shards.manifest.has_labelled_replies != folders[0].manifest.has_labelled_replies:
                raise ConfigError(
                    f"One of {folders[0].folder} and {shards.folder} contains pairs of replies, the other single "
                    "replies with labels. Train on one kind."
                )
        self.rule, self.folders = rule, tuple(folders)
        self.has_labelled_replies = folders[0].manifest.has_labelled_replies
        """True if records are single replies with a label, and the second reply belongs to another prompt."""
        self._records = Corpus(folders)
        self._known: dict[int, tuple[int, int, int]] = {}
        self.padding = self._records.padding
        self.first_documents = tuple(_DOCUMENTS * first for first in self._records.first_documents)

    def rows(self, rows: Sequence[Row]) -> list[Row]:
        """Return the same rows with each record's documents. Reads lengths, not tokens."""
        sizes = self._sizes([record for row in rows for record in row.documents])
        at, found = 0, []
        for row in rows:
            found.append(self._row(row.documents, sizes[at : at + len(row)]))
            at += len(row)
        return found

    def lengths_of(self, documents: np.ndarray) -> np.ndarray:
        """Return the documents' lengths, int64 [n]."""
        lengths = [self._parts(*divmod(int(document), _DOCUMENTS)).num_tokens for document in documents]
        return np.array(lengths, np.int64)

    def slices(self, pieces: Iterable[Piece]) -> list[np.ndarray]:
        """Return the tokens of these pieces, as ``ShardSet.slices`` does."""
        wanted = list(pieces)
        sizes = self._sizes([document // _DOCUMENTS for document, _, _ in wanted])
        of_prompts: list[Piece] = []
        of_replies: list[Piece] = []
        for (document, start, stop), size in zip(wanted, sizes, strict=True):
            record, part = divmod(document, _DOCUMENTS)
            parts = self._cut(part, *size)
            begin, end = (min(place, parts.prompt_tokens) for place in (start, stop))
            of_prompts.append((record, parts.prompt_start + begin, parts.prompt_start + end))
            begin, end = (min(max(place - parts.prompt_tokens, 0), parts.reply_tokens) for place in (start, stop))
            of_replies.append((record, parts.reply_start + begin, parts.reply_start + end))
        prompts, replies = self._records.slices(of_prompts, "source"), self._records.slices(of_replies)
        return [np.concatenate(both) for both in zip(prompts, replies, strict=True)]

    def target_runs(self, index: int) -> np.ndarray:
        """Return the span of a document's reply tokens, as in ``EncodedDocument.target_runs``; empty for a prefix."""
        parts = self._parts(*divmod(index, _DOCUMENTS))
        if not parts.reply_tokens:
            return np.empty(0, np.int64)
        return np.array([parts.prompt_tokens, parts.num_tokens], np.int64)

    def label(self, number: int) -> int | None:
        """Return a record's label for its first reply's document, None for its other documents."""
        record, part = divmod(number, _DOCUMENTS)
        if part != _FIRST:
            return None
        return self._records.label(record)

    def references(self, rows: Iterable[Row]) -> np.ndarray:
        """Return the reference log-likelihoods of all records in these rows, float64 [P, 2]; NaN if unknown."""
        found = [np.empty((0, 2))]
        for row in rows:
            for document in row.documents:
                record, part = divmod(document, _DOCUMENTS)
                if part == _FIRST:
                    found.append(self._reference(record)[None])
        return np.concatenate(found)

    def _reference(self, record: int) -> np.ndarray:
        number = self._records.folder_of(record)
        references = self.folders[number].references
        if references is None:
            return np.full(2, np.nan)
        return references.sums_N2[record - self._records.first_document[number]]

    def _row(self, records: Sequence[int], sizes: Sequence[tuple[int, int, int]]) -> Row:
        """Return the row with these records' documents."""
        documents: list[int] = []
        lengths: list[int] = []
        prefixes: list[int] = []
        for record, size in zip(records, sizes, strict=True):
            prefix = -1
            if self.rule.shared_prompts and size[0] > 1:
                prefix = len(documents)
                documents.append(_DOCUMENTS * record + _PREFIX)
                lengths.append(self._cut(_PREFIX, *size).num_tokens)
                prefixes.append(-1)
            for part in (_FIRST, _SECOND):
                documents.append(_DOCUMENTS * record + part)
                lengths.append(self._cut(part, *size).num_tokens)
                prefixes.append(prefix)
        row = Row(documents, [0] * len(documents), lengths)
        if self.rule.shared_prompts:
            row.prefixes = prefixes
        return row

    def _parts(self, record: int, part: int) -> _Parts:
        """Return what one of a record's documents consists of."""
        return self._cut(part, *self._sizes([record])[0])

    def _cut(self, part: int, prompt: int, first: int, second: int) -> _Parts:
        """Return what a document consists of, given the tokens of the record's prompt and replies."""
        if part == _PREFIX:
            return _Parts(0, prompt - 1, 0, 0)
        start = prompt - 1 if self.rule.shared_prompts else 0
        if part == _FIRST:
            return _Parts(start, prompt - start, 0, first)
        return _Parts(start, prompt - start, first, second)

    def _sizes(self, records: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return the tokens of each record's prompt, first and second reply."""
        # A batch asks for a record several times: for its layout, its tokens, and each reply's targets. Threads may
        # share the dictionary: each has its own reference to one that never loses an entry.
        known = self._known
        new = sorted({record for record in records if record not in known})
        if new:
            if len(known) > _KNOWN_RECORDS:
                known = self._known = {record: known[record] for record in records if record in known}
            # All together, in ascending order: shards are read front to back.
            numbers = np.array(new, np.int64)
            prompts, replies = self._records.lengths_of(numbers, "source"), self._records.lengths_of(numbers)
            seconds = self._records.second_starts(numbers)
            sizes = np.stack([prompts, seconds, replies - seconds], axis=1).tolist()
            known.update(zip(new, map(tuple, sizes), strict=True))
        return [known[record] for record in records]


@dataclass(frozen=True, slots=True)
class _Parts:
    """Tokens of a document: some of the record's prompt, then a reply."""

    prompt_start: int
    prompt_tokens: int
    reply_start: int
    """Start of the reply in the record's tokens."""
    reply_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.reply_tokens


def check_preferences(shards: ShardSet) -> None:
    """Raise ConfigError unless a folder contains preferences."""
    if not shards.manifest.is_preferences:
        raise ConfigError(
            f"the run compares replies, but {shards.folder} contains no preferences.\nBuild some with "
            "`longctx data build --kind preferences`, or choose another train.objective."
        )
