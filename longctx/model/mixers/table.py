"""The network of each mixer, and the cores in one process, by their names (``longctx/architecture/mixers``)."""

from __future__ import annotations

from longctx.kernels.processor import Products
from longctx.model.attention.core import AttentionCore
from longctx.model.attention.local import LocalAttention
from longctx.model.mixers.latent import LatentAttention, UnfoldedLatentAttention
from longctx.model.mixers.linear import LocalLinearAttention
from longctx.model.mixers.network import MixerNetwork
from longctx.model.mixers.softmax import GroupedQueryAttention

NETWORKS: dict[str, type[MixerNetwork]] = {
    "softmax": GroupedQueryAttention,
    "latent": LatentAttention,
    "linear": GroupedQueryAttention,
    "latent_linear": UnfoldedLatentAttention,
}


def local_cores(products: Products) -> dict[str, AttentionCore]:
    """The cores in one process."""
    return {"softmax": LocalAttention(products=products), "linear": LocalLinearAttention()}
