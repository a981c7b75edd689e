"""The objective: its sums, its balance loss, and how they add up over parts of a sequence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from longctx.batch import IGNORED_TARGET
from longctx.model.decoder import Decoder
from longctx.model.training_pass import TrainingPass
from longctx.objectives.causal_lm import CausalLM
from tests.longctx.attention_cores import Blind
from tests.longctx.samples import BATCH, dense_config, gradients, step_loss, tiny_config

TRAINING = TrainingPass(seed=11)


def model(config=None, *, core=None, **kwargs) -> CausalLM:
    decoder = Decoder(config or tiny_config(), core and {"softmax": core})
    return CausalLM(decoder, **kwargs).double()


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
    config = tiny_config(router_z_loss_weight=0.1, router_jitter=0.3, residual_dropout=0.2)
    lm = model(config, core=Blind(), z_loss=0.01, label_smoothing=0.1)
    flat, shards = shards_of_batch()
    whole = lm.loss_sum(lm(flat, TRAINING))
    assert whole.counts_LE.sum(1).tolist() == [2 * 36, 2 * 36]  # k choices a token, padding in none
    step_loss(whole, 0.1, 0.1).backward()
    wanted = gradients(lm)

    local = []
    lm.reduce_counts = lambda counts, batch: local.append(counts.clone()) or counts
    for shard in shards:
        lm(shard, TRAINING)
    assert len(local) == len(shards), "one call a micro-batch, also without a token"
    lm.reduce_counts = lambda counts, batch: sum(local)
    lm.zero_grad()
    parts = [lm.loss_sum(lm(shard, TRAINING)) for shard in shards]
    sum(step_loss(part, 0.1, 0.1) for part in parts).backward()
    totals = [sum(x) for x in zip(*(part.tensors() for part in parts), strict=True)]
    torch.testing.assert_close(totals, list(whole.tensors()))
    torch.testing.assert_close(gradients(lm), wanted)


def test_reduced_counts_may_be_written_in_place():
    lm = model(reduce_counts=lambda counts, batch: counts.mul_(3))
    torch.testing.assert_close(lm(BATCH), model()(BATCH))  # counts_LE stay local; the balance loss is scale-free


def test_dense_models_have_no_balance():
    lm = model(dense_config(), reduce_counts=lambda counts, batch: pytest.fail("nothing to reduce"))
    loss = lm.loss_sum(lm(BATCH))
    assert (list(loss.sums), loss.counts_LE, loss.diagnostics) == (["objective", "nll"], None, None)
    loss["objective"].backward()


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
