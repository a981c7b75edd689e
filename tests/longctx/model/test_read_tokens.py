"""Hidden states of some tokens only: the same as those of all, with every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longctx.batch import PackedDocuments, ReadTokens
from longctx.model.attention.local import LocalAttention
from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution, TrainingPass
from longctx.objectives.routed_task import hidden_states
from tests.longctx.image_samples import image_stream, vit_config
from tests.longctx.samples import gradients, randomize

DENSE = {"num_experts": 0, "shared_ffn_size": 0}
SOME = ReadTokens(torch.tensor([32, 0, 47]))
FIRSTS = ReadTokens.of_firsts(torch.tensor([0, 16, 32, 48]), PackedDocuments((0, 16, 32, 48, 64), ()))
MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "experts": {},
    "experts, then a dense layer": {"dense_layers": (1,)},
    "dropout": {**DENSE, "residual_dropout": 0.3},
    "gates": {**DENSE, "attention_gate": True},
    "grouped heads, norms and sinks": {**DENSE, "num_kv_heads": 2, "qk_norm": "head", "sinks": True},
    "norms after, of all heads": {**DENSE, "norm_order": "post", "qk_norm": "full"},
    "rotary positions": {**DENSE, "position": "rope"},
    "a window": {**DENSE, "window": 3, "layers": ("window",)},
}


def states_of(config, keep, chunk_tokens, read, chosen):
    decoder = Decoder(config, execution=Execution(keep, chunk_tokens=chunk_tokens)).double()
    randomize(decoder)
    stream = image_stream(config, 4)[0]
    found, stats = hidden_states(decoder, stream, TrainingPass(seed=5), return_stats=True, read=read)
    if read is None:
        found = found[:, chosen.indices_F]
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (found * weights).sum().backward()
    return found, gradients(decoder.model), [layer.counts_SE for layer in stats]


@pytest.mark.parametrize("read", [SOME, FIRSTS], ids=["some", "firsts"])
@pytest.mark.parametrize(("keep", "chunk_tokens"), [("all", 0), ("attention", 0), ("inputs", 0), ("attention", 9)])
@pytest.mark.parametrize("name", MODELS)
def test_some_tokens_are_those_of_all(name, keep, chunk_tokens, read):
    config = vit_config(**MODELS[name])
    wanted, wanted_gradients, wanted_counts = states_of(config, keep, chunk_tokens, None, read)
    found, found_gradients, counts = states_of(config, keep, chunk_tokens, read, read)
    assert found.shape == (1, len(read.indices_F), config.hidden_size)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)
    # Routers count all tokens.
    assert all(map(torch.equal, counts, wanted_counts))
    for parameter, gradient in wanted_gradients.items():
        torch.testing.assert_close(found_gradients[parameter], gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "queries"), [("dense", 4), ("sinks", 4), ("rotary positions", 64), ("a window", 64)])
def test_the_last_layer_computes_only_their_queries(name, queries, monkeypatch):
    config, counts, forward = vit_config(**MODELS.get(name, {**DENSE, "sinks": True})), [], LocalAttention.__call__

    def counting(core, q, *arguments, **options):
        counts.append(q.shape[1])
        return forward(core, q, *arguments, **options)

    monkeypatch.setattr(LocalAttention, "__call__", counting)
    hidden_states(Decoder(config), image_stream(config, 4)[0], read=FIRSTS)
    assert counts == [64, queries]


def test_first_tokens_are_a_document_each():
    documents = PackedDocuments.of_lengths((3, 0, 2, 2, 4), padding=(4,))
    assert FIRSTS.documents == PackedDocuments((0, 1, 2, 3, 4))
    found = ReadTokens.of_firsts(torch.tensor([0, 3, 5]), documents).documents
    assert found == PackedDocuments.of_lengths((1, 0, 1, 1, 0))
    # One has no label, and which is not known; neither is padding.
    assert ReadTokens.of_firsts(torch.tensor([0, 3]), documents).documents is None
    assert ReadTokens.of_firsts(torch.tensor([0, 3, 5]), PackedDocuments(documents.bounds)).documents is None


def test_a_rank_may_read_none():
    config = vit_config(**MODELS["dense"])
    decoder = Decoder(config)
    found = hidden_states(decoder, image_stream(config, 2)[0], read=ReadTokens(torch.tensor([], dtype=torch.int64)))
    assert found.shape == (1, 0, config.hidden_size)
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in decoder.model.parameters())
