"""Keys from earlier versions and other trainers that a run does not have, and their replacements."""

from __future__ import annotations

import re
from collections.abc import Collection

from longctx.errors import ConfigError

_NO_MICS = (
    "DeepSpeed has removed MiCS ZeRO-3 sharding.\n"
    "Try zero.stage=3 with zero.hpz_partition_size, the ranks per node: backward gathers weights within a node, and "
    "optimizer state is partitioned over all ranks."
)
_REMOVED_KEYS = {
    "data.changed_exclusions": "only `longctx data build --without` leaves shards out. Delete the key.",
    "train.recompute": (
        "train.keep sets the activations that each block saves for backward.\n"
        'Write keep = "attention" for recompute = true and keep = "all" for recompute = false; on the command line '
        "--train.keep attention."
    ),
    "zero.mics_shard_size": _NO_MICS,
    "zero.mics_hierarchical_params_gather": _NO_MICS,
}
"""Keys from earlier versions and DeepSpeed for which the nearest known name would mislead."""

_TOKENS = "train.tokens_per_step is the global batch in tokens, and sets the number of micro-batches"
_DTYPE = 'train.dtype is "bfloat16" or "float32", without loss scaling'
_MEMORY = 'to recompute blocks, set train.keep to "attention" or "inputs"'
_STEPS = "train.steps counts steps; the first log lines have their number of passes over the data"
_NO_TENSOR = "parallel.context shards rows, zero.stage = 3 shards weights, parallel.expert shards experts"
_OTHER_TRAINER_KEYS = {
    "learning_rate": "train.lr",
    "max_steps": "train.steps",
    "train_iters": "train.steps",
    "num_train_epochs": _STEPS,
    "num_epochs": _STEPS,
    "epochs": _STEPS,
    "warmup_ratio": "train.warmup_steps",
    "lr_scheduler_type": 'train.schedule, "cosine" or "inverse_sqrt"',
    "min_lr": "train.final_lr_ratio, a fraction of train.lr",
    "max_grad_norm": "train.clip_norm",
    "gradient_clipping": "train.clip_norm",
    "clip_grad": "train.clip_norm",
    "adam_epsilon": "train.eps",
    "optim": 'train.optimizer, "adamw" or "muon"',
    "bf16": _DTYPE,
    "fp16": _DTYPE,
    "torch_dtype": _DTYPE,
    "mixed_precision": _DTYPE,
    "gradient_accumulation_steps": _TOKENS,
    "global_batch_size": _TOKENS,
    "train_batch_size": _TOKENS,
    "per_device_train_batch_size": "train.micro_batch_rows",
    "train_micro_batch_size_per_gpu": "train.micro_batch_rows",
    "micro_batch_size": "train.micro_batch_rows",
    "gradient_checkpointing": _MEMORY,
    "activation_checkpointing": _MEMORY,
    "recompute_granularity": _MEMORY,
    "max_seq_length": "data.seq_len",
    "max_seq_len": "data.seq_len",
    "max_length": "data.seq_len",
    "seq_length": "data.seq_len",
    "sequence_len": "data.seq_len",
    "block_size": "data.seq_len",
    "sample_packing": 'data.packing, "best_fit" by default',
    "dataset": "data.train, a folder that `longctx data build` makes",
    "datasets": "data.train, a folder that `longctx data build` makes",
    "dataset_name": "data.train, a folder that `longctx data build` makes",
    "data_path": "data.train, a folder that `longctx data build` makes",
    "model_name_or_path": "run.start_from, a folder with the model",
    "base_model": "run.start_from, a folder with the model",
    "pretrained_checkpoint": "run.start_from, a folder with the model",
    "resume_from_checkpoint": "run.resume",
    "logging_steps": "run.log_every",
    "log_interval": "run.log_every",
    "report_to": "run.trackers",
    "save_steps": "checkpoint.every_steps",
    "save_interval": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "eval_steps": "validation.every_steps",
    "eval_interval": "validation.every_steps",
    "deepspeed": "zero.stage and the other keys of [zero]; no DeepSpeed file is read",
    "zero_optimization": "zero.stage and the other keys of [zero]",
    "fsdp": "zero.stage, 3 to partition weights over all ranks",
    "context_parallel_size": "parallel.context",
    "context_parallel_degree": "parallel.context",
    "sequence_parallel_size": "parallel.context",
    "ring_attn": "parallel.context",
    "expert_model_parallel_size": "parallel.expert",
    "expert_parallel_degree": "parallel.expert",
    "tensor_model_parallel_size": _NO_TENSOR,
    "tensor_parallel_size": _NO_TENSOR,
    "tensor_parallel_degree": _NO_TENSOR,
    "pipeline_model_parallel_size": _NO_TENSOR,
    "pipeline_parallel_degree": _NO_TENSOR,
}
"""Names in transformers, DeepSpeed, Megatron-LM, torchtitan and Axolotl, and ours."""


def reject_unsupported_keys(names: Collection[str], known: Collection[str]) -> None:
    """Raise ConfigError if one of these keys does not exist here and its replacement is known.

    ``known`` are all keys with their sections. For a name from another trainer, any section before it is ignored.
    """
    for name in sorted(names):
        if name in _REMOVED_KEYS:
            raise ConfigError(f"there is no key {name}: {_REMOVED_KEYS[name]}")
        ours = _OTHER_TRAINER_KEYS.get(name.rpartition(".")[2])
        if ours is not None and name not in known:
            # A single key, perhaps with its values; otherwise a sentence.
            if re.match(r"[a-z]+\.[a-z_]+(,|$)", ours):
                ours = f"it is {ours}"
            raise ConfigError(f"there is no key {name} here: {ours}.\n`longctx train --help all` lists all keys.")
