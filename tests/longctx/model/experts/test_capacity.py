"""An expert's capacity: who is let in, by definition, and that it does not matter which process holds which token.

Axes: N tokens, k experts a token, R ranks.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from longctx.batch import Batch
from longctx.model.experts.capacity import Capacity, capacity_of
from longctx.model.experts.dispatch import TokenDispatcher
from longctx.model.experts.router import RouterDiagnostics, RouterStats
from longctx.model.training_pass import TrainingPass
from longctx.objectives.causal_lm import CausalLM
from tests.longctx.attention_cores import Blind
from tests.longctx.samples import BATCH, exact_lm, gradients, step_loss, tiny_config

E, K = 5, 3


def admitted(ids_Nk: Tensor, token_indices: list[int], row_tokens: int, tokens: int) -> list[list[int]]:
    """By definition: tokens come in order of their indices, and an expert that is full lets no more of the row in."""
    load: dict[tuple[int, int], int] = {}
    out = [[-1] * len(row) for row in ids_Nk.tolist()]
    for n in sorted(range(len(token_indices)), key=lambda n: token_indices[n]):
        for j, e in enumerate(ids_Nk[n].tolist()):
            key = (token_indices[n] // row_tokens, e)
            if token_indices[n] >= 0 and e >= 0 and load.get(key, 0) < tokens:
                load[key] = load.get(key, 0) + 1
                out[n][j] = e
    return out


def choices(num_tokens: int, seed: int) -> Tensor:
    """Distinct experts a token, some preferred, some choices already nowhere."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.linspace(1, 4, E).expand(num_tokens, E)
    ids = torch.multinomial(weights, K, generator=generator)
    return ids.where(torch.rand(ids.shape, generator=generator) < 0.9, -1)


def shuffled_indices(rows: int, row_tokens: int, seed: int) -> Tensor:
    """Every index once, in any order, every seventh token being padding."""
    generator = torch.Generator().manual_seed(seed)
    token_index_N = torch.randperm(rows * row_tokens, generator=generator)
    return token_index_N.where(token_index_N % 7 != 5, -1)


@pytest.mark.parametrize("tokens", [1, 3, 8, 17, 100])
@pytest.mark.parametrize(("rows", "row_tokens"), [(1, 34), (2, 17), (17, 2), (3, 1)])
def test_experts_take_the_first_of_each_row(tokens, rows, row_tokens):
    N = rows * row_tokens
    ids, token_index_N = choices(N, seed=tokens), shuffled_indices(rows, row_tokens, seed=rows)
    capacity = Capacity(tokens, E, row_tokens, rows, token_index_N)
    found = capacity.admit(ids, TokenDispatcher().gather)
    assert found.tolist() == admitted(ids, token_index_N.tolist(), row_tokens, tokens)
    loads = torch.bincount(found[found >= 0], minlength=E)
    assert loads.max() <= tokens * rows


@pytest.mark.parametrize("owners", [[0, 1, 1, 0, 2, 4], [3] * 6, [0, 1, 2, 3, 4, 0]])
def test_any_shard_of_the_tokens_is_decided_alike(owners):
    """Five ranks, some of which hold nothing, gathered in an order that is not theirs."""
    rows, row_tokens, tokens = 2, 18, 4
    ids, token_index_N = choices(36, seed=0), shuffled_indices(rows, row_tokens, seed=1)
    whole = Capacity(tokens, E, row_tokens, rows, token_index_N).admit(ids, TokenDispatcher().gather)
    owner = torch.tensor(owners * 6)
    sent = {}
    for r in range(5):
        Capacity(tokens, E, row_tokens, rows, token_index_N[owner == r]).admit(
            ids[owner == r], lambda x, r=r: sent.setdefault(r, x)
        )
    everyone = torch.cat([sent[r] for r in (3, 0, 4, 2, 1)])
    for r in range(5):
        mine = owner == r
        found = Capacity(tokens, E, row_tokens, rows, token_index_N[mine]).admit(ids[mine], lambda _: everyone)
        assert torch.equal(found, whole[mine])


@pytest.mark.parametrize("factor", [1.0, 1.1, 1.25, 1.7, 2, 100.0])
def test_capacity_is_the_mean_load_times_a_factor_rounded_up(factor):
    for k, tokens, experts in ((1, 10, 1), (2, 4096, 16), (8, 1_048_576, 128), (3, 7, 5), (1, 1, 64)):
        config = tiny_config(num_experts=experts, experts_per_token=k, capacity_factor=factor)
        exact = Fraction(round(100 * factor), 100) * k * tokens / experts
        assert capacity_of(config, tokens) == max(1, math.ceil(exact))


# In the decoder


class Recording(TokenDispatcher):
    """One process that notes what each layer gathers."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def gather(self, values_NX: Tensor) -> Tensor:
        self.sent.append(values_NX)
        return values_NX


class Together(TokenDispatcher):
    """One of several ranks, given what all of them would have sent."""

    def __init__(self, everyone: list[Tensor]) -> None:
        self.everyone = list(everyone)

    def gather(self, values_NX: Tensor) -> Tensor:
        whole = self.everyone.pop(0)
        known = set(map(tuple, whole.tolist()))
        assert all(tuple(row) in known or row[0] < 0 for row in values_NX.tolist())
        return whole


TRAINING = TrainingPass(seed=3)


def model(**changes) -> CausalLM:
    return exact_lm(**{"core": Blind(), "capacity_factor": 1.0, "router_z_loss_weight": 0.1, **changes})


def test_training_alone_has_a_capacity():
    free, limited = model(capacity_factor=0.0), model()
    torch.testing.assert_close(limited(BATCH), free(BATCH), rtol=0, atol=0)
    loss = limited.loss_sum(limited(BATCH, TRAINING))
    assert (loss.diagnostics.dropped_assignments > 0).all()
    assert not torch.equal(loss["nll"], free.loss_sum(free(BATCH))["nll"])
    roomy = model(capacity_factor=4.0)
    torch.testing.assert_close(roomy(BATCH, TRAINING), free(BATCH))


def test_rows_keep_their_capacity_when_they_are_laid_end_to_end():
    lm = model()
    wanted = lm(BATCH, TRAINING)
    torch.testing.assert_close(lm(BATCH.flatten_rows(), TRAINING), wanted)
    longer = Batch(**{**vars(BATCH.flatten_rows()), "row_tokens": 40})  # one row, whose first tokens take all the room
    assert not torch.equal(lm(longer, TRAINING)[1], wanted[1])


def test_token_indices_are_those_of_the_rows_and_padding_has_none():
    """Positions restart in every document, and whichever it is that padding follows."""
    recording = Recording()
    model(dispatcher=recording)(BATCH, TRAINING)
    is_padding = BATCH.document_ids.flatten() < 0
    for sent in recording.sent:
        assert torch.equal(sent[:, 0], torch.arange(40).where(~is_padding, -1).int())


@pytest.mark.parametrize("keep", ["all", "attention"])
def test_shards_of_a_sequence_are_let_in_as_the_whole(keep):
    flat = BATCH.flatten_rows()
    recording = Recording()
    lm = model(dispatcher=recording)
    whole = lm.loss_sum(lm(flat, TRAINING))
    step_loss(whole, 0.0, 0.1).backward()
    assert len(recording.sent) == 2, "a gather a layer"
    assert whole.diagnostics.dropped_assignments.min() > 0
    owner = torch.tensor([0, 1, 1, 0, 2] * 8)
    sums, grads = [], []
    for r in range(4):  # the last one holds no token
        together = Together(recording.sent)
        part = model(dispatcher=together, keep=keep)
        loss = part.loss_sum(part(flat.map_tokens(lambda x, r=r: x[:, owner == r]), TRAINING))
        step_loss(loss, 0.0, 0.1).backward()
        assert not together.everyone, "gathered once, also where layers are recomputed"
        sums.append(loss)
        grads.append(gradients(part))
    for name in ("objective", "router_z", "nll"):
        torch.testing.assert_close(sum(loss[name] for loss in sums), whole[name])
    assert torch.equal(sum(loss.counts_LE for loss in sums), whole.counts_LE)
    for name in RouterDiagnostics._fields:
        found = sum(getattr(loss.diagnostics, name) for loss in sums)
        torch.testing.assert_close(found, getattr(whole.diagnostics, name))
    for name, wanted in gradients(lm).items():
        torch.testing.assert_close(sum(g[name] for g in grads), wanted)


def test_what_is_refused_is_missing_and_the_rest_is_as_it_was():
    """A layer by its definition: gates of all k choices, the refused ones' terms left out."""
    from longctx.model.experts.moe_layer import MixtureOfExperts, MoECall

    torch.manual_seed(0)
    layer = MixtureOfExperts(tiny_config(shared_ffn_size=0)).double()
    for p in layer.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(1, 20, 32, dtype=torch.float64)
    capacity = Capacity(6, 4, 20, 1, torch.arange(20))
    documents = torch.zeros(1, 20, dtype=torch.int64)
    out, *stats = layer(x, MoECall(documents_Bt=documents, num_documents=1, capacity=capacity))
    probs = (x[0] @ layer.gate.weight.T).softmax(-1)
    gates, ids = probs.topk(2)
    gates = gates / gates.sum(-1, keepdim=True)
    kept = torch.tensor(admitted(ids, list(range(20)), 20, 6))
    wanted = torch.zeros_like(x[0])
    for n in range(20):
        for j in range(2):
            if kept[n, j] >= 0:
                gate, up = (layer.experts.gate_up_proj[kept[n, j]] @ x[0, n]).chunk(2)
                row = layer.experts.down_proj[kept[n, j]] @ (torch.nn.functional.silu(gate) * up)
                wanted[n] += gates[n, j] * row
    torch.testing.assert_close(out[0], wanted)
    counts, _, _, diagnostics = RouterStats.from_tensors(stats)
    assert diagnostics.dropped_assignments == (kept < 0).sum() > 0
    assert torch.equal(counts[0], torch.bincount(ids.flatten(), minlength=4)), "what was chosen, full or not"
