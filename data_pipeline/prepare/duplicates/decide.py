"""Decides which documents in a corpus are kept and which are held out, once for all source parts before encoding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data_pipeline.prepare.duplicates.duplicate_groups import find_copies, find_groups
from data_pipeline.prepare.duplicates.duplicate_rule import DuplicateRule
from data_pipeline.prepare.duplicates.signatures import similarity
from data_pipeline.prepare.duplicates.signed import SignedCorpus
from data_pipeline.shuffle import fall_below, falls_below

# Part of the format: another value would move documents between the splits.
SPLIT_SEED_TAG = 0x76616C6964


def is_held_out(text_hash: int, fraction: float) -> bool:
    """Return whether a document with this text hash goes to the validation split."""
    return falls_below(text_hash, fraction, SPLIT_SEED_TAG)


def are_held_out(text_hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Apply ``is_held_out`` to every hash and return bool [n]."""
    return fall_below(text_hashes, fraction, SPLIT_SEED_TAG)


_AT_ONCE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Removal:
    """Removed documents, each with the kept document that it equals or resembles: arrays [n], in source order."""

    documents: np.ndarray
    kept: np.ndarray
    """Kept document for each removed one."""
    is_exact: np.ndarray
    """True if the texts are equal."""
    similarity: np.ndarray
    """Similarity estimated from the signatures; 1 for equal texts."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Result of comparing all documents in a corpus."""

    removal: Removal
    assigned: np.ndarray
    """Kept documents whose group determines their split, in order, int64 [n]."""
    is_held_out: np.ndarray
    """True for the validation split, bool [n]."""
    num_groups: int
    """Groups with several documents, including equal texts."""
    largest_group: int
    """Documents in the largest group."""


# Within each group, documents are ranked by length (longest first) and then by source order. The first is kept; each
# later one is kept unless it is similar to a document that is already kept. So every removed document is similar to a
# kept one, even if the group is a chain a ~ b ~ c in which a and c are not similar.
def decide(corpus: SignedCorpus, rule: DuplicateRule, validation_fraction: float) -> Decision:
    """Compare all documents; return the removed ones, and the splits for the others in their groups."""
    first_copies = find_copies(corpus)
    groups = first_copies
    if rule.finds_near:
        groups = find_groups(corpus, first_copies, rule)
    members, groups = _in_groups(groups)
    first_copies = first_copies[members]
    # Continue with group members only: most documents in a corpus have no duplicate.
    text_bytes = corpus.document_rows(members)["text_bytes"].astype(np.int64)
    # Sort by group, and within a group by rank.
    order = np.lexsort((members, -text_bytes, groups))
    members, groups, first_copies = members[order], groups[order], first_copies[order]
    is_first = np.diff(groups, prepend=-1) != 0
    assigned, held_out = _place(corpus, members, is_first, groups, first_copies, validation_fraction)
    removal = _empty_removal()
    if rule.removes:
        removal = _remove(corpus, members, groups, first_copies, rule)
        # Removed documents need no split.
        stays = ~np.isin(assigned, removal.documents)
        assigned, held_out = assigned[stays], held_out[stays]
    sizes = np.diff(np.append(np.flatnonzero(is_first), len(members)))
    return Decision(
        removal=removal,
        assigned=assigned,
        is_held_out=held_out,
        num_groups=len(sizes),
        largest_group=int(sizes.max(initial=1)),
    )


def _in_groups(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the documents whose group has other members, and their groups."""
    is_own = groups == np.arange(len(groups))
    has_others = np.zeros(len(groups), dtype=bool)
    # A group is named after its smallest member, so every other member points to it.
    has_others[groups[~is_own]] = True
    members = np.flatnonzero(has_others | ~is_own)
    return members, groups[members]


def _place(
    corpus: SignedCorpus,
    members: np.ndarray,
    is_first: np.ndarray,
    groups: np.ndarray,
    first_copies: np.ndarray,
    validation_fraction: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the members of groups with several distinct texts, and whether each is held out, in source order."""
    # The highest-ranked document's hash decides: as random as for any single document.
    group_held_out = are_held_out(corpus.document_rows(members[is_first])["hash"], validation_fraction)
    number = np.cumsum(is_first) - 1
    # Equal texts share their hash and so their split.
    starts = first_copies[is_first][number]
    has_distinct_texts = np.zeros(len(group_held_out), dtype=bool)
    has_distinct_texts[number[first_copies != starts]] = True
    in_distinct_group = has_distinct_texts[number]
    order = np.argsort(members[in_distinct_group])
    return members[in_distinct_group][order], group_held_out[number][in_distinct_group][order]


def _remove(
    corpus: SignedCorpus, members: np.ndarray, groups: np.ndarray, first_copies: np.ndarray, rule: DuplicateRule
) -> Removal:
    """Return the removed documents from all groups; members are sorted by group and then by rank."""
    count = len(members)
    kept = members.copy()
    similarities = np.ones(count)
    is_copy = members != first_copies
    if rule.finds_near:
        _resemble(corpus, members, groups, np.flatnonzero(~is_copy), rule, kept, similarities)
    # Copies follow the first of their equal texts: they equal it if it is kept, and otherwise resemble the document
    # that replaces it.
    order = np.argsort(members)
    original = order[np.searchsorted(members, first_copies, sorter=order)]
    kept[is_copy], similarities[is_copy] = kept[original[is_copy]], similarities[original[is_copy]]
    removed = np.flatnonzero(kept != members)
    removed = removed[np.argsort(members[removed])]
    is_exact = kept[removed] == first_copies[removed]
    return Removal(documents=members[removed], kept=kept[removed], is_exact=is_exact, similarity=similarities[removed])


def _resemble(
    corpus: SignedCorpus,
    members: np.ndarray,
    groups: np.ndarray,
    rest: np.ndarray,
    rule: DuplicateRule,
    kept: np.ndarray,
    similarities: np.ndarray,
) -> None:
    """Write, for each member in ``rest`` (sorted positions), the kept document that replaces it and their similarity.

    Works in rounds: in every group the first remaining document is kept, and all that resemble it are removed.
    """
    while len(rest):
        # One round handles all groups: the number of rounds is the maximum number of kept documents per group, not the
        # number of groups.
        is_leader = np.diff(groups[rest], prepend=-1) != 0
        leaders = rest[is_leader][np.cumsum(is_leader) - 1][~is_leader]
        rest = rest[~is_leader]
        stays = np.ones(len(rest), dtype=bool)
        for some in _blocks(len(rest)):
            first, second = members[leaders[some]], members[rest[some]]
            found = similarity(corpus.signatures(first), corpus.signatures(second))
            near = found >= rule.similarity
            stays[some] = ~near
            kept[rest[some][near]], similarities[rest[some][near]] = first[near], found[near]
        rest = rest[stays]


def _blocks(count: int) -> Iterator[slice]:
    for start in range(0, count, _AT_ONCE):
        yield slice(start, min(start + _AT_ONCE, count))


def _empty_removal() -> Removal:
    empty = np.empty(0, dtype=np.int64)
    return Removal(documents=empty, kept=empty, is_exact=empty.astype(bool), similarity=empty.astype(np.float64))
