"""Hidden states of some tokens only: the same as those of all, with every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution, TrainingPass
from longctx.objectives.routed_task import hidden_states
from tests.longctx.image_samples import image_stream, vit_config
from tests.longctx.samples import gradients, randomize

DENSE = {"num_experts": 0, "shared_ffn_size": 0}
READ = torch.tensor([32, 0, 47])
MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "experts": {},
    "experts, then a dense layer": {"dense_layers": (1,)},
    "dropout": {**DENSE, "residual_dropout": 0.3},
    "gates": {**DENSE, "attention_gate": True},
}


def states_of(config, keep, chunk_tokens, read):
    decoder = Decoder(config, execution=Execution(keep, chunk_tokens=chunk_tokens)).double()
    randomize(decoder)
    stream = image_stream(config, 4)[0]
    found, stats = hidden_states(decoder, stream, TrainingPass(seed=5), return_stats=True, read=read)
    if read is None:
        found = found[:, READ]
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (found * weights).sum().backward()
    return found, gradients(decoder.model), [layer.counts_SE for layer in stats]


@pytest.mark.parametrize(("keep", "chunk_tokens"), [("all", 0), ("attention", 0), ("inputs", 0), ("attention", 9)])
@pytest.mark.parametrize("name", MODELS)
def test_some_tokens_are_those_of_all(name, keep, chunk_tokens):
    config = vit_config(**MODELS[name])
    wanted, wanted_gradients, wanted_counts = states_of(config, keep, chunk_tokens, None)
    found, found_gradients, counts = states_of(config, keep, chunk_tokens, READ)
    assert found.shape == (1, len(READ), config.hidden_size)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)
    # Routers count all tokens.
    assert all(map(torch.equal, counts, wanted_counts))
    for parameter, gradient in wanted_gradients.items():
        torch.testing.assert_close(found_gradients[parameter], gradient, rtol=0, atol=1e-12)


def test_a_rank_may_read_none():
    config = vit_config(**MODELS["dense"])
    decoder = Decoder(config)
    found = hidden_states(decoder, image_stream(config, 2)[0], read=torch.tensor([], dtype=torch.int64))
    assert found.shape == (1, 0, config.hidden_size)
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in decoder.model.parameters())
