"""Multi-token prediction: losses and gradients against the definition, and what counts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from longctx.batch import IGNORED_TARGET, Batch
from longctx.errors import ConfigError
from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution
from longctx.objectives.build import Objective, build_objective
from longctx.objectives.task import weighed
from tests.longctx.model.plain_decoder import PlainDecoder
from tests.longctx.samples import ahead, dense_config, gradients, packed_batch, randomize

WEIGHT = 0.3
CONFIGS = {
    "one": dense_config(mtp_layers=1),
    "three, own head": dense_config(mtp_layers=3, tie_embeddings=False, embedding_scale=2.0, norm_offset=True),
    "behind a window": dense_config(mtp_layers=2, layers=("window",), window=3, rope_layers=(False, True)),
}
BATCH = ahead(packed_batch([[1, 2, 3, 12], [15, 3]], padding=2))


def plain_loss(decoder: Decoder, batch: Batch) -> tuple[torch.Tensor, PlainDecoder]:
    """The step's loss, document by document and block by block."""
    plain, config = PlainDecoder(decoder), decoder.config
    tokens_N, targets_N = batch.tokens.flatten(), batch.targets.flatten()
    table = plain.weights["model.embed_tokens.weight"]
    head = plain.weights.get("lm_head.weight", table)
    hidden_NM = plain(batch.tokens, batch.positions, batch.cu_seqlens).flatten(0, 1)

    def nll(hidden_NM, targets_N):
        return functional.cross_entropy(hidden_NM @ head.T, targets_N, ignore_index=IGNORED_TARGET, reduction="sum")

    loss = nll(hidden_NM, targets_N) / (targets_N != IGNORED_TARGET).sum()
    further, count = 0.0, 0
    for number in range(config.mtp_layers):
        at = f"model.mtp.{number}"
        read_N, wanted_N = torch.zeros_like(tokens_N), torch.full_like(tokens_N, IGNORED_TARGET)
        for first, behind in pairwise(batch.documents.bounds):
            for i in range(first, behind - 1 - number):
                read_N[i], wanted_N[i] = tokens_N[i + 1 + number], targets_N[i + 1 + number]
        joined = (
            plain.norm(table[read_N] * config.embedding_scale, f"{at}.join.enorm"),
            plain.norm(hidden_NM, f"{at}.join.hnorm"),
        )
        x_NM = plain.linear(torch.cat(joined, -1), f"{at}.join.eh_proj")
        hidden_NM = plain.norm(
            plain.block(x_NM, batch.positions.flatten(), config.num_layers + number, f"{at}.block"), f"{at}.norm"
        )
        further, count = further + nll(hidden_NM, wanted_N), count + int((wanted_N != IGNORED_TARGET).sum())
    assert count == batch.num_mtp_targets(config.mtp_layers)
    return loss + WEIGHT * further / count, plain


def build(config, execution=None):
    lm = build_objective(Decoder(config, execution=execution), Objective(mtp_weight=WEIGHT))
    randomize(lm)
    return lm.double()


def step(lm, batch):
    sums = lm.loss_sum(lm(batch))
    loss = weighed(lm.terms, sums, lm.denominators(batch))
    loss.backward()
    return loss.detach(), gradients(lm)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("execution", [Execution(), Execution("inputs", chunk_tokens=5)], ids=["whole", "chunks"])
def test_loss_and_gradients_are_those_of_the_definition(name, execution):
    lm = build(CONFIGS[name], execution)
    loss, got = step(lm, BATCH)
    wanted, plain = plain_loss(lm.network, BATCH)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=1e-12)
    assert {name.removeprefix("network.") for name in got} == set(plain.weights)
    for name, gradient in got.items():
        wanted = plain.weights[name.removeprefix("network.")].grad
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-12, msg=lambda t, n=name: f"{n}: {t}")


def test_what_does_not_count_is_read_all_the_same():
    """Of replies alone are predicted, by blocks further ahead too."""
    lm, counted = build(CONFIGS["one"]), torch.rand(BATCH.tokens.shape) < 0.5
    masked = replace(BATCH, targets=BATCH.targets.masked_fill(~counted, IGNORED_TARGET))
    loss, _ = step(lm, masked)
    wanted, _ = plain_loss(lm.network, masked)
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=1e-12)
    assert 0 < masked.num_mtp_targets(1) < BATCH.num_mtp_targets(1)


def test_a_model_without_such_blocks_has_the_same_main_loss():
    lm, other = build(CONFIGS["one"]), build(replace(CONFIGS["one"], mtp_layers=0))
    other.load_state_dict(lm.state_dict(), strict=False)
    for name in ("objective", "nll"):
        assert torch.equal(lm.loss_sum(lm(BATCH))[name], other.loss_sum(other(BATCH))[name])
    assert torch.equal(lm.token_nll(BATCH), other.token_nll(BATCH))


@pytest.mark.parametrize(
    "changes",
    [
        {"position": "learned"},
        {"norm_order": "post"},
        {"encoder_layers": 1},
        {"causal": False},
        {"segments": 2},
        {"shared_layers": True},
    ],
)
def test_a_model_that_such_blocks_cannot_read_is_refused(changes):
    with pytest.raises(ConfigError, match="mtp_layers=1"):
        dense_config(mtp_layers=1, **changes)
