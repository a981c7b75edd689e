"""``RunConfig``: everything a run is told: defaults, then a TOML file, then flags. Strict, frozen, checked once."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import sys
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tomli_w
import torch
import tyro
from pydantic import TypeAdapter, ValidationError

from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.kernels.select import KERNELS
from longctx.presets import PRESETS
from parallel.heads import check_heads
from parallel.layout import check_layout
from parallel.mesh import check_degrees
from parallel.parallelize import check_experts, check_layers

QUICKSTART = Path(__file__).parent / "recipes" / "quickstart.toml"


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """Where the run lives and how it starts."""

    output_dir: str = "runs/quickstart"
    """Folder of the run: config, metrics, logs, checkpoints, report."""
    resume: str = "no"
    """Checkpoint folder to go on from, "latest" or "newest-good" (hashes checked) of this run, or "no"."""
    start_from: str = "no"
    """Checkpoint, or run folder (its newest), whose weights a new run begins with, at step 0 with an optimiser and
    schedule of its own; rope, max_positions and window may be others there. A run that resumes does not read it."""
    seed: int = 0
    """Seed of the initial weights and the order of the data."""
    hostfile: str = "launcher"
    """Hostfile the world size is checked against: "launcher" takes deepspeed's own --hostfile, "none" opts out."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto takes GPUs where every rank of the machine has one of its own."""
    timeout_seconds: float = 600.0
    """How long a rank waits for the others before it gives up with an error."""


@dataclass(frozen=True, kw_only=True)
class ModelSection(ModelConfig):
    """The decoder: a preset, or fields of its own, or a preset with some fields changed."""

    preset: str = "quickstart"
    """Named shape that the other fields start from; see longctx/presets.py."""

    def config(self) -> ModelConfig:
        """The model without the preset's name."""
        values = dataclasses.asdict(self)
        del values["preset"]
        return ModelConfig.from_dict(values)


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """What the run reads."""

    train: str = "runs/data"
    """Shard folder to train on, as `data build` wrote it."""
    validation: str = ""
    """Shard folder to validate on; empty: the "validation" folder inside data.train."""
    seq_len: int = 2048
    """Tokens a row; longer documents are cut into rows of this length."""


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """Optimisation."""

    steps: int = 700
    """Optimiser steps of the whole run, resumed parts included."""
    stop_after: int = 0
    """End after this step with a checkpoint, the schedule unchanged, to go on later with run.resume; 0 never."""
    tokens_per_step: int = 2048
    """Tokens (padding included) that one optimiser step sees over all ranks; gradient accumulation follows from it."""
    micro_batch_rows: int = 1
    """Rows that go through the model at once."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of weights and activations; auto is bfloat16 where the device multiplies it natively (and zero.stage is
    not 0), else float32. Masters, moments and accumulation are float32 in any case."""
    lr: float = 5e-3
    """Peak learning rate."""
    warmup_steps: int = 40
    """Steps of linear warm-up."""
    final_lr_ratio: float = 0.05
    """Learning rate at the last step as a share of the peak; cosine in between."""
    weight_decay: float = 0.1
    """AdamW's decoupled decay of matrices; norms and biases do not decay."""
    beta1: float = 0.9
    """AdamW's decay of the gradient's mean."""
    beta2: float = 0.95
    """AdamW's decay of the gradient's square."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    clip_norm: float = 1.0
    """Gradient norm above which gradients are scaled down; 0 never."""
    z_loss: float = 0.0
    """Weight of the squared log-sum-exp of each target's logits, which keeps the softmax normalised (PaLM: 1e-4)."""
    label_smoothing: float = 0.0
    """Share of each target that is spread evenly over the vocabulary. Logged losses are those of the plain target."""
    recompute: bool = False
    """Whether backward recomputes each block instead of keeping its activations; of attention the result is kept, and
    of experts their choice and output: recomputing sends nothing and chooses nothing anew."""
    recompute_experts: Literal["none", "activation", "all"] = "activation"
    """What backward forms again of the experts: nothing, the activation between their two products, or all but the
    tokens they were given (which then travel once more where experts are on other ranks). With ``train.recompute`` it
    is always the last."""
    record_routing: str = "no"
    """Folder to write every step's choice of experts to, a file a step; "no" writes none."""
    replay_routing: str = "no"
    """Folder of such files whose choice of experts is followed instead of the routers' own; "no" follows none."""


@dataclass(frozen=True, kw_only=True)
class ParallelSection:
    """How the ranks share the work; the data degree is what remains of the world."""

    context: int = 1
    """Ranks that share one sequence."""
    ulysses: int = 1
    """How many of those hold the same rows and split heads; the rest is the ring."""
    expert: int = 1
    """Neighbouring ranks over which the experts of each layer are spread, whatever sequences these work on; divides the
    ranks and model.num_experts."""
    expert_tile_tokens: int = 0
    """Tokens of a rank that travel to their experts at a time, while those before are computed; 0 is all at once.
    Bounds the memory that the experts of a long row take."""
    layout: str = "zigzag"
    """Which token lives where: contiguous, zigzag, striped or balanced. zigzag evens out attention over long documents,
    balanced over any packed documents."""
    transport: Literal["auto", "p2p", "two_level", "all_gather"] = "auto"
    """How keys and values travel: p2p straight from their owner, two_level once to each node and round inside it (auto
    does so where a ring spans nodes), all_gather all at once, for more memory."""
    gradient_wire: Literal["float32", "bfloat16"] = "float32"
    """Dtype of key and value gradients between ranks; bfloat16 halves the bytes and rounds each rank's part."""
    kernel: str = "auto"
    """Attention kernel of one device; auto takes the fastest that can serve the run and says which."""
    deterministic: bool = False
    """Whether attention's backward must repeat to the bit on GPUs too (slower there); on CPUs it always does."""


@dataclass(frozen=True, kw_only=True)
class ZeroSection:
    """DeepSpeed ZeRO."""

    stage: int = 1
    """0: nothing partitioned; 1: optimiser state; 2: and gradients; 3: and weights."""
    offload: Literal["none", "cpu"] = "none"
    """Where optimiser state lives; only none is built."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """Saving."""

    every_steps: int = 100
    """Steps between checkpoints; 0 saves at the end only."""
    keep_last: int = 2
    """Checkpoints kept; older ones go once a newer one is committed. 0 keeps all."""


@dataclass(frozen=True, kw_only=True)
class ValidationSection:
    """Held-out loss."""

    every_steps: int = 100
    """Steps between validations; 0 validates at the end only."""
    rows: int = 16
    """Rows of data.seq_len tokens that a validation reads, always the same ones; 0 never validates."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A pretraining run. Every key can stand in a TOML file (`--config run.toml`) or be a flag (`--train.lr 1e-3`)."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=lambda: ModelSection.from_dict(expand_preset({})))
    data: DataSection = field(default_factory=DataSection)
    train: TrainSection = field(default_factory=TrainSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    zero: ZeroSection = field(default_factory=ZeroSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    validation: ValidationSection = field(default_factory=ValidationSection)

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype, once ``resolve`` has settled it."""
        return torch.float32 if self.train.dtype == "auto" else getattr(torch, self.train.dtype)

    def resolve(self, *, native_bfloat16: bool) -> RunConfig:
        """The config with nothing left to the machine: ``train.dtype`` is a dtype."""
        if self.train.dtype != "auto":
            return self
        dtype = "bfloat16" if native_bfloat16 and self.zero.stage else "float32"
        return dataclasses.replace(self, train=dataclasses.replace(self.train, dtype=dtype))

    @property
    def rows_per_step(self) -> int:
        """Rows that one optimiser step sees."""
        return self.train.tokens_per_step // self.data.seq_len

    def accumulation(self, world_size: int) -> int:
        """Micro-batches of one rank in a step."""
        return self.rows_per_step // (self.train.micro_batch_rows * (world_size // self.parallel.context))

    @property
    def validation_folder(self) -> str:
        """Shard folder to validate on."""
        return self.data.validation or str(Path(self.data.train) / "validation")

    def check(self, world_size: int) -> None:
        """ConfigError for the first rule between fields, or between fields and world, that does not hold."""
        from parallel.zero import check_zero  # imports DeepSpeed, which takes seconds: --help should not wait for it

        check_degrees(
            world_size,
            context=self.parallel.context,
            ulysses=self.parallel.ulysses,
            expert=self.parallel.expert,
        )
        check_experts(self.model, self.parallel.expert, world_size)
        check_zero(self.zero.stage, self.dtype)
        _check_built(self)
        _check_ranges(self)
        _check_routing(self)
        _check_step(self, world_size)
        tokens = self.data.seq_len * self.train.micro_batch_rows
        if self.model.position == "learned" and self.data.seq_len > self.model.max_positions:
            raise ConfigError(
                f"data.seq_len={self.data.seq_len} is longer than the table of learned positions, "
                f"model.max_positions={self.model.max_positions}.\nTry --data.seq_len {self.model.max_positions}."
            )
        check_layout(self.parallel.layout, tokens, self.parallel.context, self.parallel.ulysses)
        check_heads(self.model.num_heads, self.model.num_kv_heads, self.parallel.ulysses)
        check_layers(self.model, self.parallel.layout, self.parallel.context // self.parallel.ulysses)

    def to_toml(self) -> str:
        """The resolved config as TOML."""
        return tomli_w.dumps(dataclasses.asdict(self))


def _check_built(config: RunConfig) -> None:
    if config.parallel.kernel not in ("auto", *KERNELS):
        raise ConfigError(f"parallel.kernel={config.parallel.kernel!r} is unknown. Try one of {['auto', *KERNELS]}.")
    if config.zero.offload != "none":
        raise ConfigError(
            f"zero.offload={config.zero.offload!r} is not built yet. Use none, and zero.stage=3 for memory."
        )


_OF_EXPERTS = (
    *("parallel.expert_tile_tokens", "train.recompute_experts", "train.record_routing", "train.replay_routing"),
    *("model.balance_scope", "model.router_z_loss_weight", "model.selection_bias_rate", "model.router_jitter"),
    *("model.capacity_factor", "model.capacity_mode"),
)
"""Options that a model without experts does not read."""


def _check_routing(config: RunConfig) -> None:
    """Nothing is asked of experts that are not there, and routing files are not read where they are written."""
    if not config.model.num_experts:
        defaults = RunConfig(model=ModelSection())
        for name in _OF_EXPERTS:
            section, key = name.split(".")
            value, plain = (getattr(getattr(c, section), key) for c in (config, defaults))
            if value != plain:
                raise ConfigError(
                    f"{name}={value} means nothing to a model without experts (model.num_experts=0).\n"
                    f"Leave it out ({name}={plain}), or set model.num_experts."
                )
    folders = {key: getattr(config.train, key) for key in ("record_routing", "replay_routing")}
    for key, folder in folders.items():
        if not folder.strip():
            raise ConfigError(f"train.{key}={folder!r} must name a folder. Try {key}=no for none.")
    given = [Path(folder).resolve() for folder in folders.values() if folder != "no"]
    if len(given) != len(set(given)):
        raise ConfigError(
            f"train.record_routing and train.replay_routing are the same folder, {folders['record_routing']!r}: each "
            "step would overwrite what it has read. Name another one for train.record_routing."
        )


def _check_ranges(config: RunConfig) -> None:
    at_least = {
        "data.seq_len": (config.data.seq_len, 1),
        "train.steps": (config.train.steps, 1),
        "train.micro_batch_rows": (config.train.micro_batch_rows, 1),
        "train.stop_after": (config.train.stop_after, 0),
        "train.warmup_steps": (config.train.warmup_steps, 0),
        "train.clip_norm": (config.train.clip_norm, 0),
        "train.weight_decay": (config.train.weight_decay, 0),
        "train.eps": (config.train.eps, 0),
        "train.z_loss": (config.train.z_loss, 0),
        "checkpoint.every_steps": (config.checkpoint.every_steps, 0),
        "checkpoint.keep_last": (config.checkpoint.keep_last, 0),
        "validation.every_steps": (config.validation.every_steps, 0),
        "validation.rows": (config.validation.rows, 0),
        "run.seed": (config.run.seed, 0),
        "parallel.expert_tile_tokens": (config.parallel.expert_tile_tokens, 0),
    }
    for name, (value, least) in at_least.items():
        if not value >= least:
            raise ConfigError(f"{name}={value} must be at least {least}.")
    for name, value in (("train.lr", config.train.lr), ("run.timeout_seconds", config.run.timeout_seconds)):
        if not 0 < value < float("inf"):
            raise ConfigError(f"{name}={value} must be a positive number.")
    for name in ("beta1", "beta2", "final_lr_ratio", "label_smoothing"):
        value = getattr(config.train, name)
        if not 0 <= value <= 1 or (name != "final_lr_ratio" and value == 1):
            raise ConfigError(f"train.{name}={value} must lie between 0 and 1.")


def _check_step(config: RunConfig, world_size: int) -> None:
    """tokens_per_step must be whole micro-batches on every data rank."""
    data_degree = world_size // config.parallel.context
    unit = config.data.seq_len * config.train.micro_batch_rows * data_degree
    tokens = config.train.tokens_per_step
    if tokens < unit or tokens % unit:
        below = tokens // unit * unit
        nearest = " or ".join(str(n) for n in (below, below + unit) if n)
        raise ConfigError(
            f"train.tokens_per_step={tokens} is not a multiple of {unit} = data.seq_len {config.data.seq_len} × "
            f"train.micro_batch_rows {config.train.micro_batch_rows} × data degree {data_degree}.\nTry {nearest}."
        )


def load_run_config(argv: list[str], *, quiet: bool = False) -> RunConfig:
    """The run's config from the command line; without ``--config`` the quickstart recipe is the file.

    ConfigError for a file that cannot be read or holds an unknown key or a value of the wrong type; an unknown flag,
    like ``--help``, ends the process through SystemExit (``quiet`` keeps a rank from repeating what rank 0 prints).
    """
    argv = [a for a in argv if not a.startswith("--local_rank")]  # the deepspeed launcher adds it
    argv, path = _take_flag(argv, "--config")
    argv, preset = _take_flag(argv, "--model.preset")
    values = read_toml(Path(path) if path else QUICKSTART)
    if preset is not None:
        values.setdefault("model", {})["preset"] = preset
    defaults = from_values(values)
    with Path(os.devnull).open("w") as nowhere:
        out, err = (nowhere, nowhere) if quiet else (sys.stdout, sys.stderr)
        with redirect_stdout(out), redirect_stderr(err):
            return tyro.cli(
                RunConfig,
                args=[{"true": "True", "false": "False"}.get(a, a) for a in argv],  # TOML's spelling works here too
                default=defaults,
                prog="pretrain.py",
                description="Pretrain a model. `--config FILE.toml` names the recipe (default: quickstart); "
                "the defaults below are that file's.",
                use_underscores=True,
                config=(tyro.conf.FlagConversionOff,),
            )


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file's values; ConfigError when it is missing or malformed."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        known = sorted(p.name for p in QUICKSTART.parent.glob("*.toml"))
        raise ConfigError(f"--config {path} does not exist. Recipes in {QUICKSTART.parent}: {known}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path} is not TOML: {error}.") from error


def from_values(values: dict[str, Any]) -> RunConfig:
    """A config from nested plain values, strictly: unknown keys and wrong types are errors with a dotted path."""
    values = dict(values)
    if not all(isinstance(v, dict) for v in values.values()):
        loose = sorted(k for k, v in values.items() if not isinstance(v, dict))
        raise ConfigError(
            f"{loose[0]!r} stands outside a section. Every key belongs to one, such as [train] or [data]."
        )
    _refuse_unknown(values)
    values["model"] = expand_preset(values.get("model", {}))
    try:
        # JSON's strict mode takes tables for dataclasses and whole numbers for floats, and nothing else for another.
        return TypeAdapter(RunConfig).validate_json(json.dumps(values, default=_refuse_date), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(p) for p in first["loc"])
        raise ConfigError(f"{where}={first['input']!r}: {first['msg']}.") from error


def _refuse_date(value: Any) -> None:
    raise ConfigError(f"{value} is a date or a time, and no key takes one. Put text in quotes.")


def expand_preset(model: dict[str, Any]) -> dict[str, Any]:
    """The model section's values, the preset's under the ones that are given."""
    preset = model.get("preset", "quickstart")
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ConfigError(f"model.preset={preset!r} is unknown. Try one of {sorted(PRESETS)}.")
    values = dataclasses.asdict(PRESETS[preset]) | model | {"preset": preset}
    if isinstance(model.get("rope"), dict):
        values["rope"] = dataclasses.asdict(PRESETS[preset].rope) | model["rope"]
    return values


def _refuse_unknown(values: dict[str, dict[str, Any]]) -> None:
    sections = {f.name: _keys(f.default_factory()) for f in dataclasses.fields(RunConfig)}  # type: ignore[misc]
    known = [f"{section}.{key}" for section, keys in sections.items() for key in keys]
    for section, entries in values.items():
        if section not in sections:
            raise ConfigError(f"section [{section}] is unknown.{_nearest(section, list(sections))}")
        for key in _dotted(entries, sections[section]):
            if key not in sections[section]:
                raise ConfigError(f"key {section}.{key} is unknown.{_nearest(f'{section}.{key}', known)}")


def _keys(section: Any, prefix: str = "") -> list[str]:
    """The keys of a section; those of a table within it with its name before them, and its name alone."""
    names = []
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        names += [prefix + f.name, *(_keys(value, f"{f.name}.") if dataclasses.is_dataclass(value) else ())]
    return names


def _dotted(entries: dict[str, Any], known: list[str]) -> list[str]:
    """The keys that are given, those of a table within with its name before them."""
    found = []
    for key, value in entries.items():
        inner = isinstance(value, dict) and any(name.startswith(f"{key}.") for name in known)
        found += [f"{key}.{name}" for name in value] if inner else [key]
    return found


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5) or sorted(known)
    return f" Did you mean {' or '.join(close[:3])}?"


def _take_flag(argv: list[str], name: str) -> tuple[list[str], str | None]:
    """The arguments without ``name VALUE`` or ``name=VALUE``, and the value."""
    rest, value, at = [], None, 0
    while at < len(argv):
        if argv[at] == name:
            if at + 1 == len(argv):
                raise ConfigError(f"{name} needs a value.")
            value, at = argv[at + 1], at + 2
        elif argv[at].startswith(f"{name}="):
            value, at = argv[at].split("=", 1)[1], at + 1
        else:
            rest.append(argv[at])
            at += 1
    return rest, value
