"""How routed experts are stored on disk."""

from __future__ import annotations

from longctx.families.spec import OnDisk, TensorRule

BLOCK = "model.layers.{layer}."
MLP = BLOCK + "mlp."


def per_expert(gate: str, up: str, down: str) -> tuple[TensorRule, ...]:
    """A tensor for each expert and projection, as transformers saves them; and the fused ones of its memory, too."""
    return (
        _stacked("mlp.experts.gate_up_proj", (gate, up)),
        _stacked("mlp.experts.down_proj", (down,)),
    )


def _stacked(name: str, parts: tuple[str, ...]) -> TensorRule:
    """A parameter of all experts: on disk a tensor for each part of each expert, or the parameter itself."""
    return TensorRule(
        parameters=(BLOCK + name,),
        layouts=(OnDisk(names=tuple(BLOCK + part for part in parts)), OnDisk(names=(BLOCK + name,))),
    )


def renamed(ours: str, *theirs: str) -> TensorRule:
    """A parameter of a block under other names, the first of which is written."""
    return TensorRule(parameters=(BLOCK + ours,), layouts=tuple(OnDisk(names=(BLOCK + name,)) for name in theirs))


PER_EXPERT = per_expert(
    "mlp.experts.{expert}.gate_proj.weight",
    "mlp.experts.{expert}.up_proj.weight",
    "mlp.experts.{expert}.down_proj.weight",
)
"""The names that all families but Mixtral and GPT-OSS have."""
