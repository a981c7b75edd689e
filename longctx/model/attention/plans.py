"""``plan_layers``: what the layers of each kind see and do in one forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from longctx.batch import PackedDocuments
from longctx.config import ModelConfig
from longctx.kernels.graphs import outside_graphs
from longctx.model.attention.core import AttentionShapes, PassCore, Plan, TokenChunk
from longctx.model.attention.mask import AttentionMask


@outside_graphs  # boundaries are data: a graph that read them would serve one batch
def plan_layers(
    config: ModelConfig,
    cores: Mapping[str, PassCore],
    cu_seqlens: Sequence[int] | Tensor | PackedDocuments | None,
    tokens_Bt: Tensor,
    dtype: torch.dtype,
    *,
    placement: Any = None,
    chunk: TokenChunk | None = None,
    head_groups: int = 1,
) -> tuple[PackedDocuments, dict[str, Plan]]:
    """The batch's documents, and a plan for each kind of layer, by the kind's core.

    ``cu_seqlens`` None makes every row one document; ``dtype`` is that of queries and keys. Kinds are planned in the
    order of the layers, so ranks that agree on their plans do so in one order. With several ``head_groups`` a plan is
    that of one of them: they are alike.
    """
    if cu_seqlens is None:
        documents = PackedDocuments.of_rows(tokens_Bt.shape[0], tokens_Bt.shape[1])
    else:
        documents = PackedDocuments.of(cu_seqlens)
    shapes = layer_shapes(config, tokens_Bt, dtype, chunk)
    if head_groups > 1:
        heads, kv_heads = shapes.num_heads // head_groups, shapes.num_kv_heads // head_groups
        shapes = replace(shapes, num_heads=heads, num_kv_heads=kv_heads)
    # Once a kind and not once a layer: a plan is work on the CPU, and collective where ranks have to agree on it.
    plans = {}
    for kind in dict.fromkeys(config.layers):
        plans[kind] = cores[kind].plan(layer_mask(kind, documents, config), shapes, placement)
    return documents, plans


def layer_mask(kind: str, documents: PackedDocuments, config: ModelConfig) -> AttentionMask:
    """What the layers of a kind see."""
    mask = AttentionMask(documents)
    if kind == "window":
        return replace(mask, window=config.window)
    if kind == "sparse":
        return replace(mask, window=config.window, stride=config.sparse_stride)
    return mask


def layer_shapes(
    config: ModelConfig, tokens_Bt: Tensor, dtype: torch.dtype, chunk: TokenChunk | None = None
) -> AttentionShapes:
    """The shapes of the tensors that ``project`` makes of these tokens: the same in all layers."""
    num_kv_heads, head_dim, value_dim = config.num_kv_heads, config.head_dim, config.value_dim
    values_in_keys, cached_tokens, later_tokens = False, None, 0
    if chunk is not None:
        cached_tokens, later_tokens = chunk.start, chunk.later_tokens
    if config.is_latent and cached_tokens is None:  # each head unfolds a key and a value of its own
        num_kv_heads = config.num_heads
    elif config.is_latent:  # a cache stores the latents, which all heads share
        num_kv_heads, head_dim, value_dim = 1, config.kv_lora_rank + config.rope_head_dim, config.kv_lora_rank
        values_in_keys = True
    if config.position == "relative":  # channels of the distance stand beside those of the content
        head_dim += config.hidden_size
    # The scores themselves are made later, on the device; a kernel is chosen by the names of their rules alone.
    rules = []
    if config.attention_softcap:
        rules.append("softcap")
    if config.position == "alibi":
        rules.append("alibi")
    if config.position == "t5":
        rules.append("relative_bias")
    return AttentionShapes(
        batch=tokens_Bt.shape[0],
        tokens=tokens_Bt.shape[1],
        num_heads=config.num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=dtype,
        device_type=tokens_Bt.device.type,
        scale=config.scale,
        softcap=config.attention_softcap or None,
        rules=tuple(rules),
        cached_tokens=cached_tokens,
        later_tokens=later_tokens,
        values_in_keys=values_in_keys,
    )
