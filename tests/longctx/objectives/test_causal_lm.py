"""The objective: its sums, its balance loss, and how they add up over parts of a sequence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from longctx.batch import IGNORED_TARGET
from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution
from longctx.objectives.causal_lm import CausalLM
from tests.longctx.attention_cores import Blind
from tests.longctx.samples import dense_config, gradients, packed_batch, step_loss, tiny_config

BATCH = packed_batch([[7, 11], [15, 3]], padding=2)


def model(config=None, *, core=None, execution=None, **kwargs) -> CausalLM:
    decoder = Decoder(config or tiny_config(), core and {"softmax": core}, execution=execution)
    return CausalLM(decoder, **kwargs).double()


def mean_balance(stats, documents) -> torch.Tensor:
    """By definition: Σ_s n_s · E · Σ_e f · P, with f and P the means over the document's tokens, f per choice."""
    total = torch.zeros((), dtype=torch.float64)
    for layer in stats:
        for s in documents.unique().tolist():
            if s >= 0:
                n = (documents == s).sum()
                f, P = layer.counts_SE[s] / (2 * n), layer.prob_sums_SE[s] / n
                total = total + n * 4 * (f * P).sum()
    return total


def test_balance_sum_is_the_documents_weighted_mean():
    lm = model()
    stats = lm.network(
        BATCH.tokens, BATCH.positions, BATCH.cu_seqlens, document_ids=BATCH.document_ids, return_stats=True
    )[1]
    loss = lm.loss_sum(lm(BATCH))
    torch.testing.assert_close(loss["balance"], mean_balance(stats, BATCH.document_ids))
    assert loss.counts_LE.sum(1).tolist() == [2 * 36, 2 * 36]  # k choices a token, padding in none
    total = loss["objective"] + 0.25 * loss["balance"] + 0.5 * loss["router_z"]
    torch.testing.assert_close(step_loss(loss, 0.25, 0.5), total)


def test_balanced_experts_score_one_a_token():
    lm = model()
    for layer in lm.network.model.layers:
        torch.nn.init.zeros_(layer.mlp.gate.weight)
    # Σ_e counts · ¼ · E / k
    torch.testing.assert_close(lm.loss_sum(lm(BATCH))["balance"], torch.tensor(2 * 36.0, dtype=torch.float64))


def test_padding_tokens_change_nothing():
    """But for rounding: padding goes to other experts, whose products have other numbers of rows then, and a processor
    may add up a product of another shape in another order. No sum has more than 97 terms, and a gradient lies behind
    some ten products forward and back.
    """
    other = replace(BATCH, tokens=torch.where(BATCH.document_ids < 0, (BATCH.tokens + 1) % 97, BATCH.tokens))
    results = []
    for batch in (BATCH, other):
        lm = model(tiny_config(router_z_loss_weight=0.1))
        loss = lm.loss_sum(lm(batch))
        step_loss(loss, 0.1, 0.1).backward()
        results.append({"counts": loss.counts_LE, **loss.sums, **loss.diagnostics._asdict(), **gradients(lm)})
    assert torch.equal(results[0].pop("counts"), results[1].pop("counts"))
    for name, mine in results[0].items():
        assert (results[1][name] - mine).norm() <= 10 * 97 * 2.0**-53 * mine.norm(), name


def shards_of_batch():
    """The batch flat, and shards of its tokens that cross documents."""
    flat = BATCH.flatten_rows()
    owners = torch.tensor([0, 1, 1, 0, 2] * 8)
    return flat, [flat.map_tokens(lambda x, r=r: x[:, owners == r]) for r in range(4)]  # the last one holds no token


def test_sums_and_gradients_add_up_over_shards():
    """With counts reduced and probabilities local, losses and gradients of the shares sum to those of the whole."""
    lm = model(tiny_config(router_z_loss_weight=0.1), core=Blind(), z_loss=0.01, label_smoothing=0.1)
    flat, shards = shards_of_batch()
    whole = lm.loss_sum(lm(flat))
    step_loss(whole, 0.1, 0.1).backward()
    wanted = gradients(lm)

    local = []
    lm.reduce_counts = lambda counts, batch: local.append(counts.clone()) or counts
    for shard in shards:
        lm(shard)
    assert len(local) == len(shards), "one call a micro-batch, also without a token"
    lm.reduce_counts = lambda counts, batch: sum(local)
    lm.zero_grad()
    parts = [lm.loss_sum(lm(shard)) for shard in shards]
    sum(step_loss(part, 0.1, 0.1) for part in parts).backward()
    totals = [sum(x) for x in zip(*(part.tensors() for part in parts), strict=True)]
    torch.testing.assert_close(totals, list(whole.tensors()))
    torch.testing.assert_close(gradients(lm), wanted)


def test_reduced_counts_may_be_written_in_place():
    lm = model(reduce_counts=lambda counts, batch: counts.mul_(3))
    torch.testing.assert_close(lm(BATCH), model()(BATCH))  # counts_LE stay local; the balance loss is scale-free


@pytest.mark.parametrize("keep", ["all", "attention"])
def test_counts_are_not_doubled_by_recomputation(keep):
    lm = model(execution=Execution(keep))
    calls = []
    lm.reduce_counts = lambda counts, batch: calls.append(counts.sum().item()) or counts
    lm(BATCH)[0].backward()
    assert calls == [2 * 2 * 36]


def test_dense_models_have_no_balance():
    lm = model(dense_config(), reduce_counts=lambda counts, batch: pytest.fail("nothing to reduce"))
    loss = lm.loss_sum(lm(BATCH))
    assert (list(loss.sums), loss.counts_LE, loss.diagnostics) == (["objective", "nll"], None, None)
    loss["objective"].backward()


@pytest.mark.parametrize("config", [tiny_config(), dense_config()], ids=["moe", "dense"])
def test_token_nll_sums_to_the_loss(config):
    lm = model(config)
    nll = lm.token_nll(BATCH)
    assert nll.shape == BATCH.tokens.shape
    assert not nll.requires_grad
    assert torch.equal(nll != 0, BATCH.targets >= 0)
    torch.testing.assert_close(nll.sum(), lm(BATCH)[0].detach())


@pytest.mark.parametrize("changes", [{}, {"logit_scale": 0.3}, {"logit_softcap": 1.5}], ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("z_loss", [0.0, 0.02])
def test_the_objective_is_that_of_the_whole_logits(changes, tied, z_loss):
    """Loss and every gradient, of the embedding and the head too, as by ``cross_entropy`` on ``Decoder.logits``."""
    lm = model(dense_config(tie_embeddings=tied, **changes), z_loss=z_loss, label_smoothing=0.1)
    loss = lm.loss_sum(lm(BATCH))
    loss["objective"].backward()
    got = gradients(lm)
    lm.zero_grad()
    hidden = lm.network(BATCH.tokens, BATCH.positions, BATCH.cu_seqlens)
    logits, targets = lm.network.logits(hidden).flatten(0, 1), BATCH.targets.flatten()
    wanted = cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED_TARGET, label_smoothing=0.1)
    wanted = wanted + z_loss * (logits.logsumexp(-1)[targets != IGNORED_TARGET] ** 2).sum()
    wanted.backward()
    torch.testing.assert_close(loss["objective"], wanted)
    torch.testing.assert_close(got, gradients(lm))
    nll = cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED_TARGET)
    torch.testing.assert_close(loss["nll"], nll.sum().detach())
    torch.testing.assert_close(lm.token_nll(BATCH), nll.detach().view_as(BATCH.targets))


def test_training_lowers_the_loss_and_balances_the_experts():
    lm = CausalLM(Decoder(tiny_config()))
    optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3)
    history = []
    for _ in range(30):
        loss = lm.loss_sum(lm(BATCH))
        (step_loss(loss, 0.1) / BATCH.num_targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append((loss["nll"].item(), loss["balance"].item()))
    assert history[-1][0] < 0.3 * history[0][0]
    assert history[-1][1] < history[0][1]
