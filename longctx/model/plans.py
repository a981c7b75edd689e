"""Plans for a forward pass, made before its first layer: attention work per mixer, and positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longctx.architecture.layer_specs import can_share_prefixes, groups_of, layer_specs, mixers_of
from longctx.architecture.mixers.image_window_mixer import ImageWindowMixer
from longctx.architecture.mixers.mixer import Mixer
from longctx.architecture.mixers.softmax_mixer import SoftmaxMixer
from longctx.batch import PackedDocuments, ReadTokens
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.kernels.devices import on_cpu
from longctx.model.attention.core import AttentionCore, AttentionShapes, PassCore, Plan
from longctx.model.attention.kv_cache import TokenChunk
from longctx.model.attention.local import LocalAttention
from longctx.model.attention.mask import AttentionMask
from longctx.model.attention.sequences import PassCache
from longctx.model.mixers.cross_projections import CrossCall
from longctx.model.mixers.mixer_networks import NETWORKS
from longctx.model.source import EncodedSource


def plan_layers(
    config: ModelConfig,
    cores: Mapping[Mixer, PassCore],
    cu_seqlens: Sequence[int] | Tensor | PackedDocuments | None,
    tokens_Bt: Tensor,
    dtype: torch.dtype,
    *,
    placement: Any = None,
    chunk: TokenChunk | None = None,
    head_groups: int = 1,
) -> tuple[PackedDocuments, dict[Mixer, Plan]]:
    """Return the batch's documents, and each mixer's plan by its core.

    ``cu_seqlens=None`` makes every row one document; ``dtype`` is the queries' and keys'. Mixers are planned in layer
    order, so that ranks agree on their plans in one order. With several ``head_groups`` a plan covers one group, since
    all are equal.
    """
    if cu_seqlens is None:
        documents = PackedDocuments.of_rows(tokens_Bt.shape[0], tokens_Bt.shape[1])
    else:
        documents = PackedDocuments.of(cu_seqlens)
    if chunk is not None and not config.causal:
        raise ConfigError(
            "model.causal=false: tokens see both sides, so none can be added to those that a cache has. Generation "
            "needs model.causal=true."
        )
    if documents.prefixes and not can_share_prefixes(config):
        raise ConfigError("documents with a prefix need causal softmax attention in all layers, without a stride.")
    # One plan per mixer, not per layer: a plan is work on the CPU, and collective if ranks must agree on it.
    plans = {}
    for mixer in mixers_of(config):
        shapes = _shapes(mixer, config, tokens_Bt, dtype, chunk)
        heads, kv_heads = (n // groups_of(n, head_groups) for n in (shapes.num_heads, shapes.num_kv_heads))
        shapes = replace(shapes, num_heads=heads, num_kv_heads=kv_heads)
        windows = mixer if isinstance(mixer, ImageWindowMixer) else None
        mask = AttentionMask(documents, mixer.causal, mixer.window or None, stride=mixer.stride, image_windows=windows)
        plans[mixer] = cores[mixer].plan(mask, shapes, placement)
    return documents, plans


@dataclass(frozen=True, eq=False)
class ReadCall:
    """The tokens whose outputs are read after the last layer, and their attention."""

    tokens: ReadTokens
    plan: Plan | None
    """The core's plan for their queries and all keys; None if it computes all queries."""


def plan_read(
    config: ModelConfig,
    cores: Mapping[Mixer, PassCore],
    documents: PackedDocuments,
    read: ReadTokens | None,
    plans: Mapping[Mixer, Plan],
) -> ReadCall | None:
    """Plan the last layer for the tokens that are read, given the plans for all; return None if all are.

    The core still computes all queries across ranks, where these are spread evenly, and if the mask or the scores
    depend on a query's position.
    """
    if read is None:
        return None
    mixer = layer_specs(config)[config.num_layers - 1].mixer
    core, has_positions = cores[mixer], config.position in ("rope", "relative", "alibi", "t5")
    if read.documents is None or not isinstance(core, LocalAttention) or not isinstance(mixer, SoftmaxMixer):
        return ReadCall(read, None)
    if mixer.causal or mixer.window or mixer.stride or has_positions:
        return ReadCall(read, None)
    mask = AttentionMask(read.documents, causal=False, key_documents=documents)
    shapes = replace(plans[mixer].shapes, batch=1, tokens=read.documents.num_tokens)
    return ReadCall(read, core.plan(mask, shapes))


def cross_call(
    config: ModelConfig,
    core: AttentionCore,
    documents: PackedDocuments,
    source: EncodedSource,
    tokens_Bt: Tensor,
    placement: Any,
    head_groups: int = 1,
) -> CrossCall:
    """Plan cross attention for all layers: document n in the batch reads the source's document n. Collective."""
    scale, softcap = config.attention_scale or config.head_dim**-0.5, config.attention_softcap or None
    scores = ScoreRules(scale=scale, softcap=softcap)
    shapes = AttentionShapes(
        batch=tokens_Bt.shape[0],
        tokens=tokens_Bt.shape[1],
        num_heads=config.num_heads // groups_of(config.num_heads, head_groups),
        num_kv_heads=config.num_kv_heads // groups_of(config.num_kv_heads, head_groups),
        head_dim=config.head_dim,
        value_dim=config.head_dim,
        dtype=source.hidden_BsM.dtype,
        device_type=tokens_Bt.device.type,
        scale=scale,
        softcap=softcap,
        rules=scores.rules,
    )
    _check_padding(documents, source.documents)
    own, source_documents = _equally_many(documents, source.documents)
    mask = AttentionMask(own, causal=False, key_documents=source_documents)
    return CrossCall(core, core.plan(mask, shapes, placement, source.placement), scores, source)


def _check_padding(own: PackedDocuments, source_documents: PackedDocuments) -> None:
    """Raise ConfigError if a document on one side would read padding on the other, as their numbers differ."""
    if own.padding is None or source_documents.padding is None:
        return
    for number in set(own.padding) ^ set(source_documents.padding):
        lengths = [side.lengths[number] for side in (own, source_documents) if number < side.num_documents]
        if len(lengths) == 2 and all(lengths):
            raise ConfigError(
                f"document {number} is padding on one side and has {max(lengths)} tokens on the other: document n "
                "reads the source's document n. Give both sides as many documents, empty ones among them."
            )


def _equally_many(*packed_documents: PackedDocuments) -> list[PackedDocuments]:
    """Append empty documents to the shorter side until both have equally many: padding may span several."""
    most = max(side.num_documents for side in packed_documents)
    filled = []
    for side in packed_documents:
        # An empty document starts where it ends, and so do any number of them.
        bounds = side.bounds + (side.num_tokens,) * (most - side.num_documents)
        filled.append(PackedDocuments(bounds, side.padding))
    return filled


def _shapes(
    mixer: Mixer, config: ModelConfig, tokens_Bt: Tensor, dtype: torch.dtype, chunk: TokenChunk | None
) -> AttentionShapes:
    """Build the shapes that ``project`` produces for these tokens, in all layers with this mixer."""
    cached_tokens, remaining_tokens = None, 0
    if chunk is not None:
        cached_tokens, remaining_tokens = chunk.start, chunk.remaining_tokens
    heads = NETWORKS[mixer.name].heads(config, mixer, cached=cached_tokens is not None)
    # The scores are built later, on the device; kernel selection needs only the names of their rules.
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
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        value_dim=heads.value_dim,
        dtype=dtype,
        device_type=tokens_Bt.device.type,
        scale=config.scale,
        softcap=config.attention_softcap or None,
        rules=tuple(rules),
        beta_scale=2.0 if config.delta_negative else 1.0,
        cached_tokens=cached_tokens,
        remaining_tokens=remaining_tokens,
        values_in_keys=heads.values_in_keys,
    )


def resolve_positions(
    config: ModelConfig,
    documents: PackedDocuments,
    positions_Bt: Tensor,
    document_ids: Tensor | None,
    cache: PassCache | None,
    chunk: TokenChunk | None,
) -> tuple[Tensor, int]:
    """Return positions as the model reads them, and the longest document's length, or 0 if it is not needed.

    That document is the longest over all ranks, without padding. Raise ConfigError if a learned table is too short.
    """
    is_learned = config.position == "learned"
    if not is_learned and not (config.position == "rope" and config.rope.depends_on_length):
        return positions_Bt, 0
    if is_learned and document_ids is not None:
        # Padding may be longer than any document, so its positions could exceed the table.
        positions_Bt = positions_Bt.masked_fill(document_ids < 0, 0)
    if cache is None:
        longest = _longest(documents, document_ids)
    elif chunk is None:
        longest = int(positions_Bt.max()) + 1  # documents cover only the newest tokens
    else:
        longest = chunk.sequence_tokens
    if is_learned:
        check_learned(positions_Bt, longest, config.max_positions)
    return positions_Bt, longest


def _longest(documents: PackedDocuments, document_ids: Tensor | None) -> int:
    if document_ids is not None:
        documents = documents.with_padding(document_ids)
    return documents.longest


def check_learned(positions_Bt: Tensor, longest: int, max_positions: int) -> None:
    """Raise ConfigError if a learned table with ``max_positions`` rows is too short for a token.

    ``longest`` is the longest document's length over all ranks, so that all ranks raise the same error. Positions
    themselves are checked on the CPU only: on another device that would wait for earlier work.
    """
    needed = longest
    if positions_Bt.numel() and on_cpu(positions_Bt):
        needed = max(needed, int(positions_Bt.max()) + 1)
    if needed > max_positions:
        raise ConfigError(
            f"a document of {needed} tokens is longer than model.max_positions={max_positions}, the rows of the "
            f"learned position table (model.position='learned'). Cut documents to {max_positions} tokens "
            f"(data.seq_len={max_positions}), or train a table with model.max_positions={needed}."
        )
