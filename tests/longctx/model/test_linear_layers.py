"""Decoders with linear layers in one process: against the closed form, packed and alone, with a cache and without."""

from __future__ import annotations

import pytest
import torch

from longctx.generation.loop import generate
from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.model.attention.core import sinks_of
from longctx.model.attention.kv_cache import KVCache
from longctx.model.attention.mask import AttentionMask
from longctx.model.decoder import Decoder
from longctx.model.mixers.local_linear_attention import LocalLinearAttention
from longctx.model.training_pass import Execution
from tests.longctx.attention_cores import MaskIsPlan, attend_once
from tests.longctx.cached_models import without_cache
from tests.longctx.kernels.test_linear_attention import closed_form, inputs
from tests.longctx.model.attention.test_local import by_definition
from tests.longctx.samples import (
    check_documents_are_alone,
    dense_config,
    hidden_and_gradients,
    one_document,
    packed_batch,
    randomize,
    tiny_config,
)

LAYERS = ("linear", "full")


class ByClosedForm(MaskIsPlan):
    """Every weight of the flattened rows written out."""

    def __call__(self, q_BtHD, k_BtKD, v_BtKV, *, plan, **_):
        B, T = q_BtHD.shape[:2]
        q, k, v = (x.reshape(1, B * T, *x.shape[2:]) for x in (q_BtHD, k_BtKD, v_BtKV))
        return closed_form(q, k, v, plan.documents.bounds, plan.causal).view(B, T, *q.shape[2:3], -1)


class BySoftmax(MaskIsPlan):
    def __call__(self, q_BtHD, k_BtKD, v_BtKV, *, plan, scores=None, weights=(), **_):
        scores = scores or ScoreRules(scale=q_BtHD.shape[-1] ** -0.5)
        return by_definition(q_BtHD, k_BtKD, v_BtKV, plan, scores, sinks_of(weights))


def exact_decoder(cores=None, **given) -> Decoder:
    """In float64, with weights large enough to matter."""
    decoder = Decoder(dense_config(layers=LAYERS), cores, **given).double()
    randomize(decoder)
    return decoder


@pytest.mark.parametrize("lengths", [[[13]], [[1, 7, 5]], [[3, 1, 9], [1, 1, 11]]], ids=str)
@pytest.mark.parametrize("keep", ["all", "attention"])
def test_values_and_gradients_are_the_closed_form(lengths, keep):
    batch = packed_batch(lengths)
    got = hidden_and_gradients(exact_decoder(execution=Execution(keep)), batch)
    wanted = hidden_and_gradients(exact_decoder({"softmax": BySoftmax(), "linear": ByClosedForm()}), batch)
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


def test_packed_documents_are_documents_alone():
    decoder, batch = exact_decoder(), packed_batch([[3, 1, 9, 70], [1, 1, 80, 1]])
    check_documents_are_alone(decoder, batch)


def test_a_state_continues_what_rows_began():
    """Whatever the steps; two rows at once."""
    decoder, batch, cache = exact_decoder(), one_document(2, 83), KVCache()
    with torch.no_grad():
        whole = decoder(batch.tokens, batch.positions)
        steps = [(0, 1), (1, 2), (2, 71), (71, 72), (72, 83)]
        parts = [decoder(batch.tokens[:, a:b], batch.positions[:, a:b], cache=cache) for a, b in steps]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-12, atol=1e-12)
    state = cache.layer(0).state
    assert state is not None
    assert state.shape == (1, 2, 2, 8, 9), "one state a row and key head, however many tokens"


@pytest.mark.parametrize("config", [dense_config(layers=LAYERS), tiny_config(layers=("linear",))], ids=["two", "moe"])
def test_generation_is_the_same_with_a_cache(config):
    decoder = Decoder(config)
    randomize(decoder)
    prompt = list(range(5, 16))
    assert generate(decoder, prompt, 12) == without_cache(decoder, prompt, 12)


def test_a_share_of_the_tokens_is_refused():
    (q, k, v), _ = inputs(4, 2, 2, 3, 3, batch=1)
    with pytest.raises(ValueError, match="not the 9 tokens"):
        attend_once(LocalLinearAttention(), q, k, v, AttentionMask((0, 9)))
