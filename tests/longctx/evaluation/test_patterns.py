"""Attention by blocks: the weights behind the layer's own output, whatever the attention; nothing of size T × T."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longctx.batch import PackedDocuments
from longctx.errors import ConfigError
from longctx.evaluation.patterns import Blocks, attention_patterns
from longctx.model.attention.local import LocalAttention
from longctx.model.decoder import Decoder
from tests.longctx.cached_models import MODELS, config_of, ids_of

BOUNDS = (0, 9, 10, 33, 40)
WATCHED = [
    (name, layer)
    for name in MODELS
    for layer in range(config_of(name).num_layers)
    if config_of(name).layer_kind(layer) != "linear"
]


def packed() -> tuple[Tensor, Tensor, PackedDocuments]:
    """Tokens of packed documents, and their positions."""
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(BOUNDS)])
    return torch.tensor(ids_of(BOUNDS[-1])), positions, PackedDocuments.of(BOUNDS)


def by_token(model: Decoder, layer: int) -> list:
    return attention_patterns(model, *packed(), layer=layer, blocks=BOUNDS[-1])


@pytest.mark.parametrize(("name", "layer"), WATCHED)
def test_weights_times_values_are_what_the_head_gives(name, layer):
    called: list[tuple[Tensor, Tensor]] = []

    class Listening(LocalAttention):
        def __call__(self, q, k, v, **options):
            out = super().__call__(q, k, v, **options)
            called.append((v, out))
            return out

    model = Decoder(config_of(name), Listening())
    model(packed()[0][None], packed()[1][None], packed()[2])
    softmax = [n for n in range(model.config.num_layers) if model.config.layer_kind(n) != "linear"]
    v_BTKV, out_BTHV = called[softmax.index(layer)]
    for pattern in by_token(model, layer):
        shared = pattern.head * v_BTKV.shape[2] // model.config.num_heads
        wanted = out_BTHV[0, :, pattern.head].detach()
        torch.testing.assert_close(pattern.weights_NN @ v_BTKV[0, :, shared].detach(), wanted, rtol=0, atol=2e-5)
        total = pattern.weights_NN.sum(1)
        if model.config.sinks:
            assert (total < 1).all()
        else:
            torch.testing.assert_close(total, torch.ones_like(total))
        assert not pattern.weights_NN[pattern.seen_NN == 0].any()


@pytest.mark.parametrize(("name", "layer"), WATCHED)
def test_what_is_seen_is_the_layers_mask(name, layer):
    config = config_of(name)
    kind, tokens = config.layer_kind(layer), torch.arange(BOUNDS[-1])
    document = torch.bucketize(tokens, torch.tensor(BOUNDS[1:]), right=True)
    apart = tokens[:, None] - tokens
    sees = (document[:, None] == document) & (apart >= 0)
    if kind == "window":
        sees &= apart < config.window
    if kind == "sparse":
        sees &= (apart < config.window) | (apart % config.sparse_stride == 0)
    found = by_token(Decoder(config), layer)[0].seen_NN
    assert torch.equal(found, sees.float())


def test_blocks_are_means_over_queries_and_sums_over_keys():
    model = Decoder(config_of("window"))
    fine = by_token(model, 1)
    for coarse, single in zip(attention_patterns(model, *packed(), layer=1, blocks=6), fine, strict=True):
        assert (coarse.blocks.size, coarse.blocks.count) == (7, 6)
        assert coarse.blocks.bounds[-1] == (35, 40)
        for i, (q_start, q_stop) in enumerate(coarse.blocks.bounds):
            for j, (k_start, k_stop) in enumerate(coarse.blocks.bounds):
                part = single.weights_NN[q_start:q_stop, k_start:k_stop]
                assert coarse.weights_NN[i, j].item() == pytest.approx(part.sum(1).mean().item(), abs=1e-6)
                seen = single.seen_NN[q_start:q_stop, k_start:k_stop].any(1).float().mean()
                assert coarse.seen_NN[i, j].item() == pytest.approx(seen.item())


def test_chosen_heads_come_in_their_order_and_once():
    model = Decoder(config_of("grouped"))
    found = attention_patterns(model, *packed(), layer=0, heads=(3, 1, 3), blocks=4)
    assert [pattern.head for pattern in found] == [3, 1]
    every = attention_patterns(model, *packed(), layer=0, blocks=4)
    assert torch.equal(found[0].weights_NN, every[3].weights_NN)
    assert not torch.equal(every[3].weights_NN, every[1].weights_NN)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.elements = max(self.elements, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)), 0)
        return out


def test_nothing_is_as_large_as_all_queries_by_all_keys():
    T = 4096
    model = Decoder(config_of("alibi"))  # the kernel in plain PyTorch: its tensors are seen here
    tokens, positions = torch.tensor(ids_of(T)), torch.arange(T)
    with Largest() as largest:
        attention_patterns(model, tokens, positions, PackedDocuments.of(None, T), layer=1, heads=(0,), blocks=16)
    assert 0 < largest.elements < T * T / 8


def test_the_model_is_left_as_it_was():
    model = Decoder(config_of("grouped"))
    attention_patterns(model, *packed(), layer=0, blocks=4)
    assert not model.model.layers[0]._forward_pre_hooks
    broken = packed()[0].clone()
    broken[0] = -1
    with pytest.raises(IndexError):
        attention_patterns(model, broken, *packed()[1:], layer=0, blocks=4)
    assert not model.model.layers[0]._forward_pre_hooks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 2}, "layer=2: the model has layers 0 to 1"),
        ({"layer": -1}, "layer=-1"),
        ({"layer": 0}, r"linear attention.*Layers with softmax: \[1\]"),
        ({"layer": 1, "heads": (4,)}, "head=4: a layer has heads 0 to 3"),
        ({"layer": 1, "blocks": 0}, "blocks=0"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        attention_patterns(Decoder(config_of("linear")), *packed(), **options)


def test_blocks_of_lengths_that_do_not_divide():
    assert Blocks.of(5, 64).bounds == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert Blocks.of(10, 4).bounds == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert Blocks.of(1, 1).bounds == [(0, 1)]
