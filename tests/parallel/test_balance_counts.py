"""Router counts of a sequence over ranks: the same sums, of shared documents alone."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist

from longctx.batch import Batch, PackedDocuments
from parallel.layout.sequence import SequenceLayout
from parallel.mesh import Mesh
from parallel.parallelize import _context_sum
from parallel.schedule.document_segments import shared_documents
from tests.helpers import run_distributed

BOUNDS = [0, 3, 40, 41, 64, 96, 100, 120, 192]
TOKENS, EXPERTS, LAYERS = 192, 7, 3


def check_sums(world_size: int, ulysses: int) -> None:
    mesh = Mesh.build(context=world_size, ulysses=ulysses)
    documents = PackedDocuments.of(BOUNDS, TOKENS)
    document_T = torch.repeat_interleave(torch.tensor(BOUNDS).diff())
    chosen_LT = torch.randint(EXPERTS, (LAYERS, TOKENS), generator=torch.Generator().manual_seed(1))
    sent: list[torch.Tensor] = []
    all_reduce = dist.all_reduce

    def counting(tensor: torch.Tensor, *options):
        sent.append(tensor)
        return all_reduce(tensor, *options)

    dist.all_reduce = counting
    for kind, placed, by_document in itertools.product(("zigzag", "balanced"), (True, False), (True, False)):
        layout = SequenceLayout.build(kind, TOKENS, world_size, documents, ulysses)
        counts_LSE = torch.zeros(LAYERS, len(BOUNDS) - 1, EXPERTS, dtype=torch.int64)
        wanted_LSE = counts_LSE.clone()
        for layer in range(LAYERS):
            index = (document_T, chosen_LT[layer])
            wanted_LSE[layer].index_put_(index, torch.tensor(1), accumulate=True)
            own = layout.indices(mesh.context_rank)
            counts_LSE[layer].index_put_((index[0][own], index[1][own]), torch.tensor(1), accumulate=True)
        if not by_document:
            counts_LSE, wanted_LSE = counts_LSE.sum(1, keepdim=True), wanted_LSE.sum(1, keepdim=True)
        batch = _batch(documents)
        if placed:
            batch = dataclasses.replace(batch, placement=layout)
        sent.clear()
        summed = _context_sum(mesh)(counts_LSE, batch)
        shared = shared_documents(layout, BOUNDS)
        if by_document and placed:
            # What this rank counts of a document that others hold alone is nothing, and stays so.
            held = torch.zeros(len(BOUNDS) - 1, dtype=torch.bool)
            held[document_T[layout.indices(mesh.context_rank)]] = True
            held[torch.from_numpy(shared)] = True
            assert 0 < len(shared) < len(BOUNDS) - 1
            assert torch.equal(summed[:, held], wanted_LSE[:, held])
            assert sent[0].dtype == torch.int32
            assert sent[0].numel() == LAYERS * len(shared) * EXPERTS
        else:
            assert torch.equal(summed, wanted_LSE)
        assert summed.dtype == torch.int64


def _batch(documents: PackedDocuments) -> Batch:
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    return Batch(tokens=tokens, targets=tokens, positions=tokens, document_ids=tokens, documents=documents)


@pytest.mark.parametrize(("ranks", "ulysses"), [(2, 1), (3, 1), (4, 2)])
def test_counts_of_own_documents_are_those_of_all_ranks(ranks: int, ulysses: int):
    run_distributed(check_sums, ranks, ranks, ulysses)
