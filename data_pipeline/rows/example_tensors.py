"""Tensors that examples add to a rank's tokens: labels, second segments, and pixels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from data_pipeline.rows.examples import Examples
from data_pipeline.rows.preferences import PreferenceReplies
from data_pipeline.rows.row_layout import Held, RowLayout

Runs = Sequence[tuple[int, int, int]]
"""Spans of token positions, each as (start, count, step) for start, start + step, …; ascending and disjoint."""


def example_tensors(
    examples: Examples, layout: RowLayout, runs: Runs, held: Sequence[list[Held]]
) -> dict[str, torch.Tensor]:
    """Return the ``CompactBatch`` fields that these examples have; ``held`` are the documents in each of ``runs``."""
    tensors: dict[str, torch.Tensor] = {}
    rule = examples.rule
    if rule.has_labels:
        tensors["label_indices"] = _label_indices(examples, layout, runs, held)
    if rule.has_segments:
        tensors["seconds"] = _second_starts(examples, layout, held)
    if rule.pixel_bytes:
        tensors["pixels"] = _pixels(examples, layout, runs, held)
    return tensors


def reply_tensors(
    replies: PreferenceReplies, layout: RowLayout, runs: Runs, held: Sequence[list[Held]]
) -> dict[str, torch.Tensor]:
    """Return the ``CompactBatch`` fields that preferences have: this rank's labels, and all records' references."""
    return {
        "label_indices": _label_indices(replies, layout, runs, held),
        "reference_P2": torch.from_numpy(replies.references(layout.rows)),
    }


def _label_indices(
    examples: Examples | PreferenceReplies, layout: RowLayout, runs: Runs, held: Sequence[list[Held]]
) -> torch.Tensor:
    """Return this rank's first tokens in labelled documents, and their labels, int32 [2, labelled]."""
    found = [np.empty((0, 2), np.int32)]
    for number, example, first, local, _ in _on_rank(layout, runs, held):
        label = examples.label(example)
        if first == layout.documents.bounds[number] and label is not None:
            found.append(np.array([[local, label]], np.int32))
    return torch.from_numpy(np.ascontiguousarray(np.concatenate(found).T))


def _second_starts(examples: Examples, layout: RowLayout, held: Sequence[list[Held]]) -> torch.Tensor:
    """Return each document's start of its second segment, int64 [documents]; 0 for documents on other ranks."""
    seconds = np.zeros(layout.documents.num_documents, np.int64)
    for number in {number for own in held for number, _, _ in own}:
        piece = layout.piece(number)
        if piece is not None:
            seconds[number] = examples.second(piece[0])
    return torch.from_numpy(seconds)


def _pixels(examples: Examples, layout: RowLayout, runs: Runs, held: Sequence[list[Held]]) -> torch.Tensor:
    """Return this rank's pixels, uint8 [tokens, bytes], with zeros for padding."""
    num_tokens = sum(count for _, count, _ in runs)
    pixels = np.zeros((num_tokens, examples.rule.pixel_bytes), np.uint8)
    steps = [step for (_, _, step), own in zip(runs, held, strict=True) for _ in own]
    ends = [last for own in held for _, _, last in own]
    places = _on_rank(layout, runs, held, with_padding=True)
    for (number, example, first, local, is_padding), step, last in zip(places, steps, ends, strict=True):
        if is_padding:
            continue
        start = layout.documents.bounds[number]
        found = examples.pixels(example, first - start, last - start, step)
        pixels[local : local + len(found)] = found
    return torch.from_numpy(pixels)


def _on_rank(
    layout: RowLayout, runs: Runs, held: Sequence[list[Held]], *, with_padding: bool = False
) -> Iterator[tuple[int, int, int, int, bool]]:
    """Yield each document on this rank, span by span: its number, example, first token, that token's local index, and
    whether it is padding.
    """
    local = 0
    for own, (start, count, step) in zip(held, runs, strict=True):
        for number, first, _ in own:
            piece = layout.piece(number)
            if piece is not None:
                yield number, piece[0], first, local + (first - start) // step, False
            elif with_padding:
                yield number, -1, first, local + (first - start) // step, True
        local += count
