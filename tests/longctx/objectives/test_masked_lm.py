"""Masked tokens: what the loss is of, by its definition, and which data it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from longctx.batch import IGNORED_TARGET
from longctx.errors import ConfigError
from longctx.model.decoder import Decoder
from longctx.objectives.causal_lm import CausalLM
from longctx.objectives.masked_lm import MaskedLM
from tests.as_on_a_gpu import computing_as_on_a_gpu
from tests.longctx.samples import dense_config, gradients, packed_batch
from tests.oracles import MaskedAttention, stream_of

CONFIG = dense_config(causal=False)


def masked_stream():
    """Packed rows of which every third token is hidden behind token 3."""
    stream = stream_of(packed_batch([[5, 11, 1], [16, 1]], padding=3))
    is_told = (torch.arange(stream.tokens.numel()).view_as(stream.tokens) % 3 == 1) & (stream.document_ids >= 0)
    masked = stream.tokens.masked_fill(~is_told, IGNORED_TARGET)
    return replace(stream, tokens=stream.tokens.masked_fill(is_told, 3), masked=masked)


def test_loss_and_gradients_are_those_of_the_definition():
    stream = masked_stream()
    lm = MaskedLM(Decoder(CONFIG), z_loss=0.0).double()
    batch = lm.prepare(stream)
    sums = lm.loss_sum(lm(batch))
    count = lm.count([batch])["targets"]
    assert count == stream.num_targets == int((stream.masked != IGNORED_TARGET).sum())
    (sums["objective"] / count).backward()
    plain = MaskedLM(Decoder(CONFIG, {"softmax": MaskedAttention()})).double()
    hidden = plain.network(batch.tokens, batch.positions, batch.cu_seqlens)
    told = stream.masked != IGNORED_TARGET
    wanted = cross_entropy(plain.network.logits(hidden)[told], stream.masked[told])
    wanted.backward()
    torch.testing.assert_close(sums["nll"] / count, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients(lm), gradients(plain), rtol=1e-9, atol=1e-12)


def test_the_head_computes_what_was_chosen_alone():
    """Told where the chosen tokens are, it gives the same sums, likelihoods and gradients."""
    stream, found = masked_stream(), []
    for is_told in (False, True):
        lm = MaskedLM(Decoder(CONFIG)).double()
        batch = lm.prepare(stream)
        assert batch.masked_indices.tolist() == (stream.masked.flatten() != IGNORED_TARGET).nonzero().flatten().tolist()
        if not is_told:
            batch = replace(batch, masked_indices=None)
        sums = lm.loss_sum(lm(batch))
        sums["objective"].backward()
        found.append({**sums.sums, **gradients(lm), "likelihoods": lm.token_nll(batch)})
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)
    nothing = replace(stream, masked=torch.full_like(stream.masked, IGNORED_TARGET))
    lm = MaskedLM(Decoder(CONFIG)).double()
    sums = lm.loss_sum(lm(lm.prepare(nothing)))
    sums["objective"].backward()
    assert float(sums["nll"]) == 0
    assert not any(gradient.any() for gradient in gradients(lm).values())


def test_on_a_gpu_chosen_tokens_are_not_looked_for():
    stream, lm = masked_stream(), MaskedLM(Decoder(CONFIG))
    with computing_as_on_a_gpu():
        assert lm.prepare(stream).masked_indices is None
        named = replace(stream, masked_indices=torch.tensor([1, 4]))
        assert lm.prepare(named).masked_indices.tolist() == [1, 4]


def test_a_hidden_token_is_told_from_both_sides():
    stream = masked_stream()
    lm = MaskedLM(Decoder(CONFIG)).double()
    before = lm.token_nll(lm.prepare(stream))
    # The second document of the first row has tokens 5 to 15.
    other = stream.tokens.clone()
    other[0, 14] = (other[0, 14] + 1) % 97
    changed = (lm.token_nll(lm.prepare(replace(stream, tokens=other))) != before).nonzero().tolist()
    assert changed == [[0, at] for at in range(5, 16) if at % 3 == 1]


def test_each_objective_takes_its_own_data():
    stream = masked_stream()
    with pytest.raises(ConfigError, match=r"masked tokens require train\.objective=masked"):
        CausalLM(Decoder(CONFIG)).prepare(stream)
    with pytest.raises(ConfigError, match="was read without a MaskRule"):
        MaskedLM(Decoder(CONFIG)).prepare(replace(stream, masked=None))
