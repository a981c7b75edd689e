"""``resolve``: fill in every open key in a config by one list of steps that all commands share.

A key may be ``auto``, and some follow from others, as rows per micro-batch follow from the ranks that share it. Each
step resolves one key from the config so far, the machine and the data, and gives the reason. An explicit key is kept.
Steps are ordered by their dependencies: the choice of chunks needs a rank's memory, which depends on all steps before
it. No step looks at a device or a file, so a plan for another machine takes the same steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from launcher.config.config_sections import RunConfig
from launcher.config.resolved import AUTO, ResolvedConfig
from launcher.config.saved_activation_rules import chunk_choices
from launcher.config.tokens_per_rank_rules import with_context
from longctx.architecture.layer_specs import mixers_of
from longctx.errors import ConfigError
from parallel.experts.expert_tile_tokens import default_tile_tokens
from parallel.layout.layout_choice import choose_layout
from parallel.zero.zero_options import default_stage


@dataclass(frozen=True, kw_only=True)
class TargetMachine:
    """Properties shared by all ranks of a run."""

    ranks: int
    device_type: str = "cpu"
    native_bfloat16: bool = False
    """True if the device multiplies bfloat16 natively."""
    compile_problem: str = ""
    """Why some rank cannot compile blocks; empty if all can."""
    fits: Callable[[ResolvedConfig], bool] = lambda config: True
    """Returns True if a rank has enough memory for the run."""
    memory: Callable[[ResolvedConfig], str] = lambda config: ""
    """Describes the run's memory need and the memory available."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Properties of the training data."""

    is_packed: bool
    """True if some document is not a multiple of a row: rows then contain several."""
    has_held_out: bool = True
    """True if there are documents to validate on."""
    name: str = ""
    """Name in the config."""


class Choice(NamedTuple):
    """Config after a step, with the reason."""

    config: RunConfig
    why: str = ""
    """Text for the log; may be empty."""
    is_warning: bool = False
    """True if most people would not want this choice."""


Say = Callable[[Choice], None]


def resolve_without_data(config: RunConfig, machine: TargetMachine) -> RunConfig:
    """Resolve all keys that need no data. Raise ConfigError for an impossible key."""
    for step in BEFORE_DATA:
        config = step(config, machine)
    return config


def resolve(config: RunConfig, machine: TargetMachine, data: Data, *, say: Say = lambda choice: None) -> ResolvedConfig:
    """Resolve every key and pass each choice to ``say``. Raise ConfigError for an impossible key.

    Idempotent: a resolved config resolves to itself.
    """
    config = resolve_without_data(config, machine)
    for step in WITH_DATA:
        choice = step(config, machine, data)
        config = choice.config
        if choice.why:
            say(choice)
    return ResolvedConfig.of(config)


def _context(config: RunConfig, machine: TargetMachine) -> RunConfig:
    return with_context(config, machine.ranks)


def _stage(config: RunConfig, machine: TargetMachine) -> RunConfig:
    if config.zero.stage != AUTO:
        return config
    return config.changed({"zero.stage": default_stage(machine.device_type)})


def _dtype(config: RunConfig, machine: TargetMachine) -> RunConfig:
    if config.train.dtype != AUTO:
        return config
    dtype = "float32"
    # DeepSpeed's stage 0 cannot keep float32 master weights for bfloat16 weights.
    if machine.native_bfloat16 and config.zero.stage:
        dtype = "bfloat16"
    elif machine.device_type == "cuda" and not config.zero.stage:
        raise ConfigError(
            "zero.stage=0 with train.dtype=auto would train in float32 on a GPU, at a fraction of its speed: "
            "DeepSpeed has no float32 accumulation of bfloat16 in that stage.\n"
            "Try zero.stage=2, or train.dtype=float32 if that is intended."
        )
    return config.changed({"train.dtype": dtype})


def _cpu_matmul(config: RunConfig, machine: TargetMachine) -> RunConfig:
    if config.train.products != AUTO:
        return config
    matmul_dtype = "float32"
    if machine.native_bfloat16:
        matmul_dtype = "native"
    return config.changed({"train.products": matmul_dtype})


def _expert_tiles(config: RunConfig, machine: TargetMachine) -> RunConfig:
    if config.parallel.expert_tile_tokens != AUTO:
        return config
    tile_tokens = 0
    if config.model.num_experts:
        tile_tokens = default_tile_tokens(machine.device_type, config.parallel.expert)
    return config.changed({"parallel.expert_tile_tokens": tile_tokens})


def _layout(config: RunConfig, machine: TargetMachine, data: Data) -> Choice:
    model, parallel = config.model.config(), config.parallel
    if parallel.layout != AUTO:
        return Choice(config)
    layout, reason = choose_layout(
        num_tokens=config.data.seq_len * config.train.micro_batch_rows,
        degree=parallel.context,
        ulysses=parallel.ulysses,
        # Several rows in a micro-batch form one packed sequence.
        packed=data.is_packed or config.train.micro_batch_rows > 1,
        reaches=[mixer.lookback_tokens for mixer in mixers_of(model)],
        side_by_side=parallel.tokens_per_rank > 0,
        causal=model.causal,
        image_windows=model.image.window > 0,
    )
    return Choice(config.changed({"parallel.layout": layout}), f"parallel.layout=auto is {layout}: {reason}.")


def _compile(config: RunConfig, machine: TargetMachine, data: Data) -> Choice:
    requested, problem = config.train.compile, machine.compile_problem
    # CPUs gain no speed from compiled blocks.
    if requested == "off" or (requested == AUTO and machine.device_type == "cpu"):
        return Choice(config.changed({"train.compile": "off"}))
    if not problem:
        return Choice(
            config.changed({"train.compile": "on"}),
            f"Blocks are compiled (train.compile={requested}): the first step takes longer, especially with an "
            "empty cache of compiled code.",
        )
    if requested == "on":
        raise ConfigError(f"train.compile=on, but {problem}.\nInstall it there, or set train.compile=off.")
    why = f"train.compile=auto is off: {problem}. Steps take longer than with it."
    return Choice(config.changed({"train.compile": "off"}), why, is_warning=True)


def _chunks(config: RunConfig, machine: TargetMachine, data: Data) -> Choice:
    """Choose the fastest candidate that fits; if all are too large, the leanest, which is rejected later."""
    if config.train.chunk_tokens != AUTO:
        return Choice(config)
    choices = [ResolvedConfig.of(choice) for choice in chunk_choices(config)]
    found = next((choice for choice in choices if machine.fits(choice)), choices[-1])
    train = found.train
    why = f"train.chunk_tokens=auto is {train.chunk_tokens}, train.head_groups {train.head_groups}"
    return Choice(found, f"{why}{machine.memory(found)}.")


def _validation(config: RunConfig, machine: TargetMachine, data: Data) -> Choice:
    if data.has_held_out or not config.validation.rows:
        return Choice(config)
    why = (
        f"data.train={data.name} holds no held-out documents, so this run never validates.\n"
        "Set data.validation to a shard folder, or build the data with a larger --validation-fraction; "
        "validation.rows=0 turns validation off."
    )
    return Choice(config.changed({"validation.rows": 0}), why, is_warning=True)


# Order matters: ``_dtype`` reads the stage, and every later step the ranks and rows set by ``_context``.
BEFORE_DATA: tuple[Callable[[RunConfig, TargetMachine], RunConfig], ...] = (
    _context,
    _stage,
    _dtype,
    _cpu_matmul,
    _expert_tiles,
)
WITH_DATA: tuple[Callable[[RunConfig, TargetMachine, Data], Choice], ...] = (_layout, _compile, _chunks, _validation)
