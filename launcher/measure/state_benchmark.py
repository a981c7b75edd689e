"""Step time that does not depend on tokens: gradients, reduction, update, and bookkeeping, by ZeRO stage.

Measured with a run's own engine on steps with few tokens, for models in two sizes: the larger model's extra time is due
to its parameters, and the rest is the fixed cost per step.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import psutil
import torch

from launcher.config.config_sections import ModelSection
from launcher.config.data_section import DataSection
from launcher.config.resolved import ResolvedConfig, ResolvedTrain, ResolvedZero
from launcher.measure.profile_entry import DTYPES, ProfileEntry
from launcher.measure.rank_timer import RankTimer
from launcher.measure.sizes import BenchmarkSizes
from launcher.plan.parameters import num_parameters
from launcher.plan.synthetic_documents import synthetic_batch
from launcher.training.setup import build_engine
from launcher.training.task_builder import shard_batch
from longctx.kernels.processor import fastest_matmul_mode
from parallel.comm.world import long_barrier, num_ranks
from parallel.loss import count_step
from parallel.mesh import Mesh

_TOKENS = 16
_STAGES = (0, 1, 2, 3)
_LEAST_SECONDS = 1e-6
_NAMES: dict[torch.dtype, Literal["float32", "bfloat16"]] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class _Step(NamedTuple):
    accumulate: float
    """Seconds for the first of two micro-batches, which only accumulates gradients."""
    reduce: float
    """Seconds for the second one, which also reduces them."""
    update: float


def benchmark_state(timer: RankTimer, sizes: BenchmarkSizes) -> Iterator[ProfileEntry]:
    """Measure parameters per second for gradient, reduction and update, and fixed seconds, by stage and dtype."""
    axes = {"stage": [stage + 1 for stage in _STAGES]}
    description = "steps with few tokens, models in two sizes"
    names = ("gradient_parameters", "reduction_parameters", "update_parameters")
    rates = [ProfileEntry(name, axes, f"{description}: {name.partition('_')[0]}") for name in names]
    names = ("layer_seconds", "micro_batch_seconds", "step_seconds")
    fixed = [ProfileEntry(name, axes, f"{description}, parameter-independent") for name in names]
    for dtype in DTYPES:
        for stage in _STAGES:
            # DeepSpeed's stage 0 cannot accumulate bfloat16 in float32: the config check rejects such runs, so this
            # entry is unused.
            if stage == 0 and dtype == torch.bfloat16:
                _repeat_last(rates, fixed)
                continue
            of_stage = _Stage(timer, sizes, stage, dtype)
            for entry, rate in zip(rates, of_stage.rates, strict=True):
                entry.add(dtype, rate)
            for entry, seconds in zip(fixed, of_stage.fixed, strict=True):
                entry.add(dtype, seconds)
    yield from rates
    yield from fixed


def _repeat_last(*entries: list[ProfileEntry]) -> None:
    for entry in (one for group in entries for one in group):
        entry.add(torch.bfloat16, entry.values["float32"][0])


def benchmark_process(timer: RankTimer, sizes: BenchmarkSizes) -> Iterator[ProfileEntry]:
    """Measure this process's resident bytes; yield no entry on a GPU: its memory holds none of them."""
    if timer.device.type != "cpu":
        return
    # The first step imports many modules, and some of them allocate.
    _step(timer, _config(1, torch.float32, width=sizes.state_widths[0], layers=1, vocabulary=256), num_steps=1)
    rss_bytes = psutil.Process().memory_info().rss
    yield ProfileEntry.of("process_bytes", rss_bytes, "a rank's resident memory after steps with a tiny model")


class _Stage:
    def __init__(self, timer: RankTimer, sizes: BenchmarkSizes, stage: int, dtype: torch.dtype) -> None:
        small, large = sizes.state_widths
        few, many = sizes.state_vocabularies
        few_layers, layers = sizes.state_layers
        configs = [
            _config(stage, dtype, width=small, layers=few_layers, vocabulary=few),
            _config(stage, dtype, width=small, layers=layers, vocabulary=few),
            _config(stage, dtype, width=large, layers=layers, vocabulary=many),
        ]
        # deep - shallow isolates the time per layer; wide - deep the time per parameter, at equal depth.
        shallow, deep, big = (_step(timer, config, sizes.state_steps) for config in configs)
        parameters = num_parameters(configs[2]) - num_parameters(configs[1])
        self.rates = [
            parameters / max(big_seconds - of_deep, _LEAST_SECONDS)
            for big_seconds, of_deep in zip(big, deep, strict=True)
        ]
        layer = max((deep.accumulate - shallow.accumulate) / (layers - few_layers), _LEAST_SECONDS)
        # The remainders are fixed costs: per micro-batch without its layers, per step without parameters.
        micro_batch = deep.accumulate - layers * layer
        step = deep.update + deep.reduce - deep.accumulate
        self.fixed = [layer, max(micro_batch, _LEAST_SECONDS), max(step, _LEAST_SECONDS)]


def _config(stage: int, dtype: torch.dtype, *, width: int, layers: int, vocabulary: int) -> ResolvedConfig:
    """Build a config for a dense model with this width, one data rank per process and two micro-batches per step."""
    heads = max(1, width // 64)
    model = ModelSection(
        hidden_size=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        ffn_size=8 * width // 3 // 8 * 8,
        vocab_size=vocabulary,
        tie_embeddings=False,
        qkv_bias=False,
    )
    return ResolvedConfig(
        model=model,
        data=DataSection(seq_len=_TOKENS),
        train=ResolvedTrain(
            tokens_per_step=2 * _TOKENS * num_ranks(), dtype=_NAMES[dtype], products=fastest_matmul_mode()
        ),
        # Stage 3 keeps small weights unsharded: here only norms, as in models with larger matrices.
        zero=ResolvedZero(stage=stage, param_persistence_threshold=width),
    )


def _step(timer: RankTimer, config: ResolvedConfig, num_steps: int) -> _Step:
    """Return median seconds for a step's phases, without the first step, which allocates."""
    mesh = Mesh.build(context=1, ulysses=1, expert=1)
    engine = build_engine(config, mesh, accumulation=2)
    engine.initialize(0)
    task = engine.model
    shards = [task.prepare(shard_batch(synthetic_batch(config), config, mesh)) for _ in range(2)]
    counts, steps = count_step(task, shards), []

    def micro_batch(number: int) -> None:
        loss = engine.forward(shards[number].to(timer.device))
        engine.backward(task.loss(loss, counts))

    def timed(action: Callable[[], Any]) -> float:
        # Ranks wait for one another inside the action, so they must start together.
        long_barrier()
        return timer.single_call_seconds(action)

    for _ in range(num_steps + 1):
        accumulate, reduce = timed(lambda: micro_batch(0)), timed(lambda: micro_batch(1))
        steps.append(_Step(accumulate, reduce, timed(lambda: engine.step(1e-4))))
    if timer.device.type == "cuda":
        # DeepSpeed's engine is part of reference cycles: collect them, since the next engine may need the memory.
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    kept = steps[1:]
    return _Step(
        statistics.median(step.accumulate for step in kept),
        statistics.median(step.reduce for step in kept),
        statistics.median(step.update for step in kept),
    )
