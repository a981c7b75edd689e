"""Keys that tools leave in a config.json without an effect on the network: they are skipped, and an import logs them.

Any other unknown key is rejected, because it may change the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from longctx.untrusted.strict_json import printable

_ANY: tuple[Any, ...] = ()
# A key is listed only if transformers 5.24 computes the same logits with it and without, in every family here
# (tests/longctx/families/test_leftover.py). Some have a meaning in other programs: vLLM scales attention by
# attn_factor.
_TOOLS = (
    "unsloth_version", "unsloth_fixed", "model_name", "transformers.js_config", "name_or_path", "_commit_hash",
    "model_max_length", "tokenizer_padding_side", "tokenizer_model_max_length", "padding_side", "finetuning_task",
    "gradient_checkpointing", "torchscript", "use_bfloat16", "tf_legacy_loss", "_flash_attn_2_enabled",
    "attn_factor",
)  # fmt: skip
_GENERATION = (
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
    "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "prefix", "task_specific_params",
    "decoder_start_token_id", "sep_token_id", "unk_token_id", "mask_token_id", "cls_token_id",
)  # fmt: skip
_LEFTOVER: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((*_TOOLS, *_GENERATION), _ANY),
    # Only with values that leave the network unchanged.
    "quantization_config": (None,),
    "pruned_heads": (None, {}),
    "add_cross_attention": (None, False),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (None, False),
    "is_decoder": (None, True, False),
    "is_causal": (True,),
    "attention_chunk_size": (None,),
    "pretraining_tp": _ANY,
}
"""Key -> values with which it has no effect; empty if that holds for all values."""

IN_ROPE_TABLES = frozenset({"attn_factor", "extrapolation_factor", "finetuned"})
"""The same within rope_scaling and rope_parameters."""
_TABLES = ("rope_scaling", "rope_parameters")
_MOST_DELETED = 12
_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,80}")


def is_leftover(key: str, value: Any) -> bool:
    """Return True if a config.json key that the family's rules do not read is irrelevant to the network."""
    if key not in _LEFTOVER:
        return False
    allowed = _LEFTOVER[key]
    # In Python True equals 1; in a config.json they are different values.
    return not allowed or any(value == one and type(value) is type(one) for one in allowed)


def leftover_keys(config: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Return a config.json's skipped keys, with their values; ``known`` keys are read."""
    found = {key: value for key, value in config.items() if key not in known and is_leftover(key, value)}
    for table in _TABLES:
        for path, key, value in _in_table(table, config.get(table)):
            found[f"{path}.{key}"] = value
    return found


def how_to_delete(keys: Sequence[str]) -> str:
    """Return a hint about unknown keys in config.json or its tables, with a command to run in the folder."""
    hint = "If they change the model, it is not supported. Otherwise delete them from config.json"
    # The keys are untrusted: the command must not contain characters that a shell or Python interprets, nor fill a
    # screen.
    if len(keys) > _MOST_DELETED or not all(_PLAIN.fullmatch(key) for key in keys):
        return f"{hint}."
    return (
        f"{hint}, including its nested tables:\n"
        "  python -c 'import json; drop = lambda v: {k: drop(v[k]) for k in v if k not in "
        f'"{" ".join(keys)}".split()}} if isinstance(v, dict) else v; c = drop(json.load(open("config.json"))); '
        'json.dump(c, open("config.json", "w"), indent=2)\''
    )


def _in_table(path: str, table: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield path, key and value of each such key in a rope table, or in a nested one (Gemma 3)."""
    if not isinstance(table, dict):
        return
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _in_table(f"{path}.{printable(key)}", value)
        elif key in IN_ROPE_TABLES:
            yield path, key, value
