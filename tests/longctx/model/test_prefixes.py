"""Documents that share a prefix: against documents with a copy each, and the models that cannot share one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from longctx.batch import IGNORED_TARGET, PADDING_DOCUMENT, Batch, PackedDocuments
from longctx.compact_batch import CompactBatch
from longctx.errors import ConfigError
from longctx.model.attention.local import LocalAttention
from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution
from longctx.objectives.causal_lm import CausalLM
from parallel.layout.sequence import SequenceLayout
from parallel.schedule.attention_schedule import Schedule
from tests.longctx.samples import dense_config, gradients, randomize

PREFIX, FIRST, SECOND, OTHER, PADDING = 9, 6, 11, 7, 2
SHARING = {
    "dense": dense_config(),
    "window": dense_config(layers=("window", "full"), window=5),
    "window beyond the prefix": dense_config(layers=("window",), window=14),
    "alibi": dense_config(position="alibi"),
    "t5": dense_config(position="t5"),
    "learned": dense_config(position="learned", max_positions=64),
    "latent": dense_config(num_kv_heads=4, q_lora_rank=16, kv_lora_rank=12, rope_head_dim=4, value_head_dim=8),
}
KEPT_APART = {
    "gated delta": dense_config(layers=("gated_delta", "full"), delta_value_heads=8),
    "sparse": dense_config(layers=("sparse", "full"), window=4, sparse_stride=2),
}


def batches() -> tuple[Batch, Batch]:
    """The same documents with a shared prefix, and with a copy in each."""
    generator = torch.Generator().manual_seed(0)
    prefix, first, second, other, padding = (
        torch.randint(97, (n,), generator=generator) for n in (PREFIX, FIRST, SECOND, OTHER, PADDING)
    )
    shared = PackedDocuments.of_lengths((PREFIX, FIRST, SECOND, OTHER, PADDING), (4,), (-1, 0, 0, -1, -1))
    copied = PackedDocuments.of_lengths((PREFIX + FIRST, PREFIX + SECOND, OTHER, PADDING), (3,))
    return (
        batch_of([prefix, first, second, other, padding], shared, [PREFIX, 0, 0, 0]),
        batch_of(
            [torch.cat([prefix, first]), torch.cat([prefix, second]), other, padding], copied, [PREFIX, PREFIX, 0]
        ),
    )


def batch_of(tokens: list[torch.Tensor], documents: PackedDocuments, uncounted: list[int]) -> Batch:
    """A row of these documents and padding; ``uncounted`` first tokens of each have no target."""
    positions = torch.cat(
        [at + torch.arange(n) for at, n in zip(documents.first_positions, documents.lengths, strict=True)]
    )
    ids = torch.arange(len(tokens)).repeat_interleave(torch.tensor(documents.lengths))
    ids[ids == len(tokens) - 1] = PADDING_DOCUMENT
    row = torch.cat(tokens)
    targets = row.roll(-1)
    targets[documents.cu_seqlens[1:] - 1] = IGNORED_TARGET
    targets[-PADDING:] = IGNORED_TARGET
    for start, n in zip(documents.bounds, uncounted, strict=False):
        targets[start : start + n] = IGNORED_TARGET
    values = {"tokens": row, "targets": targets, "positions": positions, "document_ids": ids}
    return Batch(**{name: x[None] for name, x in values.items()}, documents=documents)


def step(name: str, batch: Batch, execution: Execution, kernel: str = "auto") -> dict[str, torch.Tensor]:
    """The loss and all gradients."""
    lm = CausalLM(Decoder(SHARING[name], {"softmax": LocalAttention(kernel)}, execution=execution)).double()
    randomize(lm)
    loss = lm.loss_sum(lm(batch))["objective"]
    loss.backward()
    return {"loss": loss.detach(), **gradients(lm)}


# The last target of a copied prompt is the first reply token, which a shared prefix leaves to the replies.
@pytest.mark.parametrize("kernel", ["auto", "blockwise", "reference"])
@pytest.mark.parametrize("name", SHARING)
def test_a_shared_prefix_equals_a_copy_for_each(name, kernel):
    shared, copied = batches()
    wanted = step(name, copied, Execution())
    executions = [Execution(), Execution("inputs"), Execution("attention", "host", chunk_tokens=7)]
    for execution in executions[: 3 if kernel == "auto" else 1]:
        got = step(name, shared, execution, kernel)
        for key, value in wanted.items():
            torch.testing.assert_close(got[key], value, rtol=1e-11, atol=1e-11, msg=lambda t, k=key: f"{k}: {t}")


@pytest.mark.parametrize("name", KEPT_APART)
def test_a_state_cannot_continue_from_a_prefix(name):
    shared, _ = batches()
    with pytest.raises(ConfigError, match="softmax attention in all layers"):
        CausalLM(Decoder(KEPT_APART[name]))(shared)


def test_ranks_refuse_a_shared_prefix():
    shared, _ = batches()
    layout = SequenceLayout.build("zigzag", 36, 2)
    with pytest.raises(ConfigError, match="own copy"):
        Schedule.build(layout, shared.documents.padded(36))


@pytest.mark.parametrize("by_lookup", [False, True])
def test_positions_follow_the_prefix(by_lookup):
    shared, _ = batches()
    T = shared.documents.num_tokens
    compact = CompactBatch(
        ids=torch.from_numpy(np.zeros(T + 1, np.int32)),
        spans=torch.tensor([[0, T, 1, 0]]),
        ends=torch.tensor([0, 0, 0, 0, 2], dtype=torch.uint8),
        bounds=shared.documents.cu_seqlens,
        documents=shared.documents,
        shape=(1, T),
        num_targets=0,
        num_tokens=T - PADDING,
    )
    found = compact.unpack_by_lookup("cpu") if by_lookup else compact.copied()
    assert torch.equal(found["positions"], shared.positions[0])


def test_documents_keep_their_prefixes():
    shared, _ = batches()
    documents = shared.documents
    assert documents.longest == PREFIX + SECOND
    assert documents.padded(50).prefixes[:5] == documents.prefixes
    assert all(prefix == -1 for prefix in documents.padded(50).prefixes[5:])
    assert len(documents.padded(50).prefixes) == documents.padded(50).num_documents
    assert replace(documents, prefixes=()) != documents
    assert [b - a for a, b in pairwise(documents.bounds)] == list(documents.lengths)
