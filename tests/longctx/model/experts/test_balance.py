"""What balances experts, by definition: losses of every scope, the bias, and what is seen of a router.

Axes: N tokens, S documents, L layers, E experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from longctx.batch import PADDING_DOCUMENT, Batch, PackedDocuments
from longctx.model.decoder import Decoder
from longctx.model.experts.balance import balance_sum, load_share, move_selection_bias_
from longctx.model.experts.router import RouterStats, Routing, router_stats
from longctx.model.training_pass import Execution, TrainingPass
from longctx.objectives.causal_lm import CausalLM
from tests.longctx.attention_cores import Blind
from tests.longctx.samples import BATCH, documents_of, gradients, packed_batch, step_loss, tiny_config

SCOPES = ("sequence", "micro_batch", "global_batch")
L, E, K, S = 2, 4, 2, 4
DOCUMENTS = torch.tensor([0, 0, 2, -1, 2, 2, -1, 0, 3, 3])


class Layer:
    """Logits of some tokens, and what a router makes of them."""

    def __init__(self, seed: int, documents: Tensor = DOCUMENTS) -> None:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(len(documents), E, generator=generator, dtype=torch.float64) * 3
        self.documents, self.logits = documents, logits.requires_grad_()
        self.chosen = logits.detach().topk(K)[1]

    def routing(self) -> Routing:
        probs = self.logits.softmax(-1)
        return Routing(self.chosen, probs.gather(1, self.chosen), probs)

    def stats(self, only: Tensor | slice = slice(None)) -> RouterStats:
        part = Routing(*(x[only] for x in self.routing()))
        return router_stats(self.logits[only], part, self.chosen[only], self.documents[only], S)


# Statistics


def test_stats_count_each_document_and_leave_padding_out():
    layer = Layer(0)
    counts, sums, z_sum, found = layer.stats()
    probs = layer.logits.softmax(-1)
    for s in range(S):
        mine = layer.documents == s
        assert counts[s].tolist() == [int((layer.chosen[mine] == e).sum()) for e in range(E)]
        torch.testing.assert_close(sums[s], probs[mine].sum(0))
    assert counts.dtype == torch.int64
    real = layer.documents >= 0
    torch.testing.assert_close(z_sum, layer.logits[real].exp().sum(-1).log().square().sum())
    torch.testing.assert_close(found.squared_logits, layer.logits[real].square().mean(-1).sum().detach())
    torch.testing.assert_close(found.entropy, -(probs[real] * probs[real].log()).sum().detach())
    assert found.dropped_assignments == found.non_finite_tokens == 0
    assert all(of.dtype == torch.float64 and not of.requires_grad for of in found)


def test_gradients_of_the_stats():
    layer, weights = Layer(1), torch.rand(S, E, dtype=torch.float64)
    _, sums, z_sum, _ = layer.stats()
    (grad,) = torch.autograd.grad((sums * weights).sum() + 0.3 * z_sum, layer.logits)
    probs, real = layer.logits.softmax(-1), layer.documents >= 0
    wanted = (weights[layer.documents] * probs)[real].sum() + 0.3 * layer.logits[real].logsumexp(-1).square().sum()
    torch.testing.assert_close(grad, torch.autograd.grad(wanted, layer.logits)[0])
    assert grad[~real].count_nonzero() == 0


def test_stats_of_shards_add_up():
    layer = Layer(2)
    shards = [torch.tensor(s).long() for s in ([0, 3, 9], [1, 2, 5, 8], [4, 6, 7], [])]
    parts = [layer.stats(shard) for shard in shards]
    totals = [sum(part) for part in zip(*(part.tensors() for part in parts), strict=True)]
    torch.testing.assert_close(totals, list(layer.stats().tensors()))


def test_what_is_refused_and_what_is_nowhere():
    """A choice that a full expert refused was made all the same; one that is nowhere by itself was not."""
    layer = Layer(3)
    chosen, experts = layer.chosen.clone(), layer.chosen.clone()
    chosen[0, 1] = experts[0, 1] = -1  # a replay said so
    experts[2, 0] = experts[4, 1] = experts[3, 0] = -1  # the last one is padding
    stats = router_stats(layer.logits, layer.routing()._replace(experts_Nk=experts), chosen, layer.documents, S)
    assert stats.diagnostics.dropped_assignments == 2
    counts = layer.stats().counts_SE
    counts[0, layer.chosen[0, 1]] -= 1
    assert torch.equal(stats.counts_SE, counts)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_finite_are_counted(value):
    """In padding too: its gradients would reach the weights like any other."""
    layer = Layer(4)
    with torch.no_grad():
        layer.logits[1] = value
        layer.logits[3, 2] = value
        layer.logits[5, 0] = value
    assert layer.stats().diagnostics.non_finite_tokens == 3
    assert Layer(4).stats().diagnostics.non_finite_tokens == 0


@pytest.mark.parametrize("keep", ["all", "attention"])
def test_a_broken_router_is_found_by_layer_and_nothing_crashes(keep):
    config = tiny_config(num_layers=3, selection_bias=True, expert_groups=2)
    lm = CausalLM(Decoder(config, execution=Execution(keep)))
    batch = packed_batch([[7, 11], [15, 3]], padding=2)
    with torch.no_grad():
        lm.network.model.layers[1].mlp.gate.weight[2, 5] = torch.nan
    loss = lm.loss_sum(lm(batch))
    step_loss(loss, 0.1).backward()
    assert loss.diagnostics.non_finite_tokens.tolist() == [0, 40, 40]  # from there on
    assert loss.counts_LE.sum(1).tolist() == [72, 72, 72]


def test_without_counting_only_what_has_a_gradient_is_formed():
    layer = Layer(5)
    documents = layer.documents
    known = layer.stats()
    stats = router_stats(layer.logits, layer.routing(), layer.chosen, documents, S, count_tokens=False)
    assert stats.counts_SE.count_nonzero() == sum(stats.diagnostics) == 0
    torch.testing.assert_close((stats.prob_sums_SE, stats.z_sum), (known.prob_sums_SE, known.z_sum))
    quiet = router_stats(layer.logits, layer.routing(), layer.chosen, documents, S, z_gradient=False)
    assert not quiet.z_sum.requires_grad
    assert quiet.z_sum == known.z_sum


# The loss


def by_definition(layers: list[Layer], scope: str, load_LE: Tensor | None) -> Tensor:
    """Σ_s n_s · E · Σ_e f · P with f and P the means over the n_s tokens of a set s, f a choice; of the step, loads."""
    total = torch.zeros((), dtype=torch.float64)
    for number, layer in enumerate(layers):
        probs, documents = layer.logits.softmax(-1), layer.documents
        if scope == "global_batch":
            loads = torch.ones(E) if load_LE is None else load_LE[number]
            for n in (documents >= 0).nonzero().flatten().tolist():
                total = total + sum(float(loads[e]) * probs[n, e] for e in range(E))
            continue
        sets = [documents == s for s in range(S)] if scope == "sequence" else [documents >= 0]
        for mine in sets:
            n = int(mine.sum())
            if n:
                f = torch.tensor([int((layer.chosen[mine] == e).sum()) / (K * n) for e in range(E)])
                total = total + n * E * (f * probs[mine].mean(0)).sum()
    return total


LOADS = torch.tensor([[0.5, 2.0, 1.0, 0.5], [4.0, 0.0, 0.0, 0.0]], dtype=torch.float64)


@pytest.mark.parametrize("loads", [None, LOADS], ids=["first step", "later"])
@pytest.mark.parametrize("scope", SCOPES)
def test_the_balance_loss_is_its_definition(scope, loads):
    layers = [Layer(seed) for seed in range(L)]
    found = balance_sum([x.stats() for x in layers], scope=scope, reduce_counts=lambda c: c, load_LE=loads)
    wanted = by_definition(layers, scope, loads)
    torch.testing.assert_close(found, wanted)
    leaves = [layer.logits for layer in layers]
    torch.testing.assert_close(torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, leaves))


@pytest.mark.parametrize(
    ("scope", "calls"), [("sequence", (L, S, E)), ("micro_batch", (L, 1, E)), ("global_batch", None)]
)
def test_counts_are_reduced_once(scope, calls):
    seen = []
    stats = [Layer(seed).stats() for seed in range(L)]
    balance_sum(stats, scope=scope, reduce_counts=lambda c: seen.append(tuple(c.shape)) or c)
    assert seen == ([] if calls is None else [calls])


def test_load_shares():
    counts = torch.tensor([[3, 1, 0, 0], [0, 0, 0, 0], [2**53, 2**53, 0, 0]])
    assert load_share(counts).tolist() == [[3, 1, 0, 0], [1, 1, 1, 1], [2, 2, 0, 0]]
    assert load_share(counts).dtype == torch.float64


# A step's gradient, however its tokens are spread


TRAINING = TrainingPass(expert_load_LE=LOADS)


def model(scope: str) -> CausalLM:
    config = tiny_config(balance_scope=scope, router_z_loss_weight=0.05, score_function="sigmoid", num_layers=L)
    return CausalLM(Decoder(config, {"softmax": Blind()})).double()


def step(scope: str, micro_batches: list[list[Batch]]) -> dict[str, Tensor]:
    """Gradients of the mean losses of a step; a micro-batch is a list of the ranks' shares."""
    lm = model(scope)
    shares = [share for micro_batch in micro_batches for share in micro_batch]
    targets = sum(share.num_targets for share in shares)
    tokens = sum(int((share.document_ids != PADDING_DOCUMENT).sum()) for share in shares)
    for micro_batch in micro_batches:
        local: list[Tensor] = []
        lm.reduce_counts = lambda counts, batch, local=local: local.append(counts.clone()) or counts
        with torch.no_grad():
            for share in micro_batch:
                lm(share, TRAINING)
        lm.reduce_counts = lambda counts, batch, local=local: torch.stack(local).sum(0)
        for share in micro_batch:
            loss = lm.loss_sum(lm(share, TRAINING))
            of_routers = 0.2 * loss["balance"] + 0.05 * loss["router_z"]
            (loss["objective"] / targets + of_routers / tokens).backward()
    return gradients(lm)


def spread(batch: Batch, ranks: int) -> list[Batch]:
    """Shares that cross documents; the last one holds nothing."""
    flat = batch.flatten_rows()
    owner = torch.tensor([0, 1, 1, 0, 2, 0, 1])[torch.arange(flat.tokens.numel()) % 7].clamp(max=ranks - 1)
    return [flat.map_tokens(lambda x, r=r: x[:, owner == r]) for r in range(ranks + 1)]


def with_padding(batch: Batch, tokens: int) -> Batch:
    """One row more of padding."""
    flat = batch.flatten_rows()
    more = {"tokens": 5, "targets": -100, "positions": 0, "document_ids": PADDING_DOCUMENT}
    columns = {n: torch.cat((getattr(flat, n), torch.full((1, tokens), v)), 1) for n, v in more.items()}
    longer = PackedDocuments.of([*flat.documents.bounds, flat.documents.num_tokens + tokens])
    return replace(flat, **columns, documents=longer, row_tokens=0)


SPREADS: dict[str, Callable[[], list[list[Batch]]]] = {
    "two ranks share the sequence": lambda: [spread(BATCH, 2)],
    "three ranks": lambda: [spread(BATCH, 3)],
    "more padding": lambda: [[with_padding(BATCH, 9)]],
    "a document a micro-batch": lambda: [[d] for d in documents_of(BATCH) if d.num_targets],
    "both": lambda: [spread(d, 2) for d in documents_of(BATCH) if d.num_targets],
}


@pytest.mark.parametrize("how", SPREADS)
@pytest.mark.parametrize("scope", SCOPES)
def test_a_steps_gradient_does_not_depend_on_how_its_tokens_are_spread(scope, how):
    """Balancing the micro-batch depends on what is in it, and on nothing else."""
    whole = step(scope, [[BATCH]])
    found = step(scope, SPREADS[how]())
    if scope == "micro_batch" and how in ("a document a micro-batch", "both"):
        assert max((found[name] - whole[name]).abs().max() for name in whole if "gate" in name) > 1e-5
        found, whole = found, step("sequence", [[BATCH]])  # a micro-batch of one document is that document
    torch.testing.assert_close(found, whole)


def test_the_global_batch_is_balanced_by_the_loads_that_are_given():
    """With a step's own loads it is the loss of that step as one micro-batch."""
    lm, other = model("global_batch"), model("micro_batch")
    wanted = other.loss_sum(other(BATCH))
    training = TrainingPass(expert_load_LE=load_share(wanted.counts_LE))
    torch.testing.assert_close(lm.loss_sum(lm(BATCH, training))["balance"], wanted["balance"])
    torch.testing.assert_close(lm.loss_sum(lm(BATCH))["balance"], torch.tensor(2 * 36.0, dtype=torch.float64))
    assert lm.state_dict().keys() == other.state_dict().keys()


# The bias


def biases(decoder: Decoder) -> list[Tensor]:
    return [layer.mlp.gate.e_score_correction_bias for layer in decoder.model.layers if hasattr(layer.mlp, "gate")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bias_moves_by_its_definition(dtype):
    decoder = Decoder(tiny_config(num_layers=4, dense_layers=(1,), selection_bias=True)).to(dtype)
    steps = [
        [[5, 1, 2, 0], [2, 2, 2, 2], [9, 0, 0, 0]],
        [[0, 0, 0, 1], [1, 1, 0, 0], [2**40 + 1, 2**40, 2**40, 2**40]],
    ]
    wanted = torch.zeros(3, 4, dtype=torch.float64)
    for counts in steps:
        move_selection_bias_(decoder.selection_biases(), torch.tensor(counts), 1e-3)
        for layer, row in enumerate(counts):
            moves = [1e-3 * ((4 * count < sum(row)) - (4 * count > sum(row))) for count in row]
            wanted[layer] += torch.tensor(moves, dtype=torch.float64) - sum(moves) / 4
        found = torch.stack(biases(decoder))
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-10)
        assert found.sum(1).abs().max() < 1e-9
    assert wanted[1].abs().max() > 0
