"""Sparse upcycling (arXiv 2212.05055): a dense model as a mixture of experts that computes the same function.

*Copy* (granularity 1): every expert is a copy of the dense FFN, the router is random. Gates sum to one, so for any
routing the output equals the dense FFN's. *Granular* (arXiv 2410.07524): a copy is cut along the FFN's width into g
shards with F/g columns, each an expert.

Equal at the start, up to rounding: the output for every token, the loss, the gradients of all parameters except experts
and routers, and the experts' gradients summed over copies (for down projections, g times that sum). Not equal: bits
(matmuls sum in another order; a g that is not a power of two rounds the weights once), and, if the router's matmul
rounds the shards of one copy differently, the order in which they are selected. After the first update, shards of a
copy get separate router gradients, and copies get gradients from the tokens that selected them.

Axes: M model width, F dense FFN width, X = F/g, E experts, C = E/g copies, g shards per copy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from longctx.architecture.model_rules import GATED
from longctx.checkpoint_format import CheckpointReader, find_checkpoint, model_config
from longctx.config import ModelConfig
from longctx.conversion.auxiliary_files import auxiliary_names
from longctx.conversion.checkpoint_checks import check_hashes
from longctx.conversion.checkpoint_writer import save_master_weights
from longctx.conversion.hf import Progress
from longctx.conversion.merged_adapters import open_merged
from longctx.errors import CheckpointError, ConfigError
from longctx.model.layers.initialize import initial_value

_DENSE = re.compile(r"(model\.layers\.\d+\.mlp\.)(gate|up|down)_proj\.(weight|bias)")


@dataclass(frozen=True, kw_only=True)
class Upcycling:
    """Experts that replace a dense FFN. Raise ConfigError if the initial function would differ."""

    num_experts: int
    """Experts E per layer, counting every shard: a multiple of granularity."""
    experts_per_token: int = 0
    """Experts per token: a multiple of granularity; 0 selects two full copies."""
    granularity: int = 1
    """Shards g per copy of the dense FFN; 1 keeps copies intact. Must divide the FFN width."""
    seed: int = 0
    """Seed for the routers' random rows."""

    def __post_init__(self) -> None:
        if self.granularity < 1:
            raise ConfigError(f"granularity={self.granularity} must be at least 1, which copies the full FFN.")
        for count, unit, least in ((self.num_experts, "experts", 1), (self.experts_per_token, "experts per token", 0)):
            if count < least or count % self.granularity:
                below = count // self.granularity * self.granularity
                raise ConfigError(
                    f"{count} {unit} are not a multiple of {self.granularity}, the shards per FFN copy: parts of the "
                    f"FFN would be lost. Try {' or '.join(str(n) for n in (below, below + self.granularity) if n > 0)}."
                )
        if self.experts_per_token == 1 and self.num_experts > 1:
            raise ConfigError(
                "1 expert per token: to keep the dense FFN's output, its gate must always be 1, so the loss "
                "would not train the router. Try 2."
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``EXPERTS[,TOP_K[,GRANULARITY]]`` from the command line."""
        try:
            numbers = [int(word) for word in text.split(",")]
        except ValueError:
            numbers = []
        if not 1 <= len(numbers) <= 3:
            raise ConfigError(f"{text!r} is not EXPERTS[,TOP_K[,GRANULARITY]], for example 8, or 8,2, or 64,16,8.")
        return cls(**dict(zip(("num_experts", "experts_per_token", "granularity"), numbers, strict=False)))


def upcycle_config(dense: ModelConfig, upcycling: Upcycling) -> ModelConfig:
    """Return the upcycled model's config; raise ConfigError if the dense one cannot be upcycled this way."""
    g = upcycling.granularity
    if dense.num_experts:
        raise ConfigError(
            f"the model has model.num_experts={dense.num_experts} already; only dense models are upcycled."
        )
    if dense.activation not in GATED:
        raise ConfigError(
            f"model.activation={dense.activation!r} is not gated, but experts are; only models with one of {GATED} "
            "are upcycled."
        )
    if dense.ffn_size % g:
        fitting = [n for n in range(1, dense.ffn_size + 1) if dense.ffn_size % n == 0]
        near = sorted(sorted(fitting, key=lambda n: abs(n - g))[:3])
        raise ConfigError(f"granularity={g} does not divide model.ffn_size={dense.ffn_size}. Try one of {near}.")
    # Gates that sum to one and no shared expert: otherwise the output would not equal the dense FFN's.
    return replace(
        dense,
        num_experts=upcycling.num_experts,
        experts_per_token=upcycling.experts_per_token or 2 * g,
        expert_ffn_size=dense.ffn_size // g,
        expert_bias=dense.ffn_bias,
        shared_ffn_size=0,
        dense_layers=(),
        score_function="softmax",
        router_bias=False,
        selection_bias=False,
        expert_groups=1,
        groups_per_token=1,
        normalize_gates=True,
        routed_scale=1.0,
    )


# Granular upcycling (arXiv 2410.07524): the dense FFN is the sum of its shards, while gates average experts; so a
# shard's down projection is g times its dense columns (in the weights, because few Hugging Face families have such a
# factor in their config). Shards of one copy share a random router row: their logits are equal, and a token routed to k
# = m·g experts gets its m best copies completely (the paper's virtual groups). Experts c·g … c·g + g − 1 are the shards
# of copy c.
def upcycle_tensors(
    tensors: Iterable[tuple[str, Tensor]], dense: ModelConfig, upcycling: Upcycling
) -> Iterator[tuple[str, Tensor]]:
    """Yield the upcycled model's tensors from the dense one's, in any order; memory holds one gate or up projection.

    Tensors keep their dtype. Raise CheckpointError if a layer's gate or up projection is missing.
    """
    config = upcycle_config(dense, upcycling)
    pending: dict[str, tuple[str, Tensor]] = {}
    for name, tensor in tensors:
        match = _DENSE.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        layer, which, kind = match.groups()
        suffix = ""
        if kind == "bias":
            suffix = "_bias"
        if which == "down":
            yield f"{layer}experts.down_proj{suffix}", _down(tensor, config, upcycling.granularity)
            # Each layer has one down projection; the layer's new router is emitted with it.
            if kind == "weight":
                yield f"{layer}gate.weight", _router(f"{layer}gate.weight", config, upcycling).to(tensor.dtype)
            continue
        # Experts store gate and up in one tensor, so the first to come waits for the other.
        key = layer + kind
        if key not in pending:
            pending[key] = which, tensor
            continue
        other = pending.pop(key)[1]
        if which == "gate":
            gate, up = tensor, other
        else:
            gate, up = other, tensor
        yield f"{layer}experts.gate_up_proj{suffix}", _gate_up(gate, up, config, upcycling.granularity)
    if pending:
        raise CheckpointError(f"the dense model lacks the matching gate or up projection: {sorted(pending)}.")


def upcycle_checkpoint(
    checkpoint: str | Path,
    output: str | Path,
    upcycling: Upcycling,
    *,
    shard_bytes: int = 5_000_000_000,
    progress: Progress | None = None,
) -> Path:
    """Write a dense checkpoint (or a run's newest) as a step-0 checkpoint of an expert model; return its folder.

    It holds float32 master weights without optimizer moments; the tokenizer is copied. The source checkpoint's hashes
    are checked first.
    """
    reader = open_merged(CheckpointReader(find_checkpoint(checkpoint)))
    dense = model_config(reader)
    config = upcycle_config(dense, upcycling)
    check_hashes(reader)
    training: dict[str, Any] = {"upcycled": {"from": reader.folder.name, "step": reader.step, **asdict(upcycling)}}
    origin = reader.manifest["training"].get("imported")
    if origin:
        # An import's token ids are still valid; its dtypes are not.
        training["imported"] = origin | {"dtype": "float32", "dtypes": {}}
    return save_master_weights(
        config,
        upcycle_tensors(reader.state_dict(torch.float32), dense, upcycling),
        Path(output),
        # Routers, and a g that is not a power of two, need float32.
        dtype=torch.float32,
        training=training,
        auxiliary_files={name: reader.folder / name for name in auxiliary_names(reader)},
        shard_bytes=shard_bytes,
        progress=progress,
    )


def _router(name: str, config: ModelConfig, upcycling: Upcycling) -> Tensor:
    """Return the router [E, M]: one random row per copy, shared by its shards."""
    g = upcycling.granularity
    rows_CM = initial_value(name, (config.num_experts // g, config.hidden_size), config, upcycling.seed)
    return rows_CM.repeat_interleave(g, dim=0)


def _gate_up(gate: Tensor, up: Tensor, config: ModelConfig, g: int) -> Tensor:
    """Return [E, 2X, M] from two [F, M], or [E, 2X] from two biases [F]: a shard's gate rows, then its up rows."""
    # Shards stay adjacent within a copy, in the router's order.
    shards = torch.cat((gate.unflatten(0, (g, -1)), up.unflatten(0, (g, -1))), dim=1)
    return torch.cat([shards] * (config.num_experts // g))


def _down(down: Tensor, config: ModelConfig, g: int) -> Tensor:
    """Return [E, M, X] from [M, F], its columns times g; or [E, M] from a bias [M].

    The bias is unchanged: gates that sum to one add it once.
    """
    if down.dim() == 1:
        return down.repeat(config.num_experts, 1)
    shards_gMX = down.unflatten(1, (g, -1)).transpose(0, 1)
    return (shards_gMX * g).repeat(config.num_experts // g, 1, 1)
