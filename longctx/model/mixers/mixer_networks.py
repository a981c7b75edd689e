"""Each mixer's network, and single-process cores, by their names (``longctx/architecture/mixers``)."""

from __future__ import annotations

from collections.abc import Mapping

from longctx.errors import ConfigError
from longctx.kernels.processor import MatmulMode
from longctx.model.attention.core import AttentionCore
from longctx.model.attention.image_windows import LocalImageWindows
from longctx.model.attention.local import LocalAttention
from longctx.model.mixers.gated_delta_net import GatedDeltaNet, KimiDeltaAttention, LocalGatedDelta, Mamba2
from longctx.model.mixers.grouped_query_attention import GroupedQueryAttention
from longctx.model.mixers.image_window_attention import ImageWindowAttention
from longctx.model.mixers.latent_attention import LatentAttention, UnfoldedLatentAttention
from longctx.model.mixers.local_linear_attention import LocalLinearAttention
from longctx.model.mixers.network import MixerNetwork

CROSS = "cross"
"""Cross attention's core, which no mixer names."""
NETWORKS: dict[str, type[MixerNetwork]] = {
    "softmax": GroupedQueryAttention,
    "latent": LatentAttention,
    "linear": GroupedQueryAttention,
    "latent_linear": UnfoldedLatentAttention,
    "gated_delta": GatedDeltaNet,
    "kda": KimiDeltaAttention,
    "mamba2": Mamba2,
    "image_window": ImageWindowAttention,
}


def with_local_cores(cores: Mapping[str, AttentionCore], matmul_mode: MatmulMode) -> dict[str, AttentionCore]:
    """Return the cores, with single-process cores for missing names.

    If ``cross`` is missing, cross attention uses softmax attention's core. Raise ConfigError for names that no mixer
    has.
    """
    local: dict[str, AttentionCore] = {
        "softmax": LocalAttention(matmul_mode=matmul_mode),
        "linear": LocalLinearAttention(),
        "gated_delta": LocalGatedDelta(),
        "image_windows": LocalImageWindows(),
    }
    known = sorted(local.keys() | {CROSS})
    unknown = set(cores).difference(known)
    if unknown:
        raise ConfigError(f"mixer cores {sorted(unknown)} are unknown. Try one of {known}.")
    found = {**local, **cores}
    # Across ranks too: cross attention is softmax attention with separate documents for the keys.
    return {CROSS: found["softmax"], **found}
