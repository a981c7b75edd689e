"""The arithmetic of a cache's memory, beside what buffers take."""

from __future__ import annotations

import pytest
import torch

from longctx.generation.cache_size import cache_bytes
from longctx.generation.prefill import prefill
from longctx.model.attention.kv_cache import LayerCache
from longctx.model.attention.local import LocalAttention
from longctx.model.decoder import Decoder
from tests.longctx.cached_models import MODELS, config_of, ids_of

CHUNK_TOKENS = 16


def buffer_bytes(layer: LayerCache) -> int:
    values = [*vars(layer).values(), *(layer.state if isinstance(layer.state, tuple) else ())]
    tensors = [x for x in values if isinstance(x, torch.Tensor)]
    return sum(x.numel() * x.element_size() for x in tensors)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_what_the_buffers_take(name):
    config, length = config_of(name), 64
    decoder = Decoder(config, {"softmax": LocalAttention("blockwise")})
    cache = decoder.new_cache()
    prefill(decoder, ids_of(length), cache, CHUNK_TOKENS)
    taken = sum(buffer_bytes(cache.layer(number)) for number in range(config.num_layers))  # type: ignore[arg-type]
    counted = cache_bytes(config, length, torch.float32, chunk_tokens=CHUNK_TOKENS)
    # The smallest buffer has 64 rows: more than a narrow window and a chunk.
    if "window" in config.layers:
        assert counted <= taken <= 4 * counted
    else:
        assert counted == taken


def test_processes_share_keys_and_not_states():
    whole = cache_bytes(config_of("grouped"), 1000, torch.float32, chunk_tokens=16)
    assert cache_bytes(config_of("grouped"), 1000, torch.float32, chunk_tokens=16, degree=4) * 4 == whole
    assert cache_bytes(config_of("grouped"), 1000, torch.bfloat16, chunk_tokens=16) * 2 == whole
    state = cache_bytes(config_of("linear alone"), 1000, torch.float32, chunk_tokens=16)
    assert cache_bytes(config_of("linear alone"), 5000, torch.float32, chunk_tokens=16, degree=4) == state
