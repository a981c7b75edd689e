"""One table per family: which config.json keys and disk tensors match a decoder's fields and parameters.

A table serves both directions. Its ``rules`` for keys and fields (``spec.ConfigRule``) read a config.json and write it.
A family supports a model if its written config.json reads back as the same function
(``config_json.unsupported_fields``), so no field without a key is ever lost. Parameters have the decoder's names on
disk, which are Llama's, unless a ``spec.TensorRule`` gives another form: renamed, transposed, one tensor per expert,
several in one tensor.
"""

from longctx.families.config_json import (
    auto_class,
    canonical_fields,
    config_from_hf,
    config_to_hf,
    dropped_training_fields,
    family_of,
    ignored_keys,
)
from longctx.families.family_registry import FAMILIES
from longctx.families.spec import Family
from longctx.families.wrapped import ALIASES, WRAPPERS, rewrap_config, unwrap_config, wrapper_of

__all__ = [
    "ALIASES",
    "FAMILIES",
    "WRAPPERS",
    "Family",
    "auto_class",
    "canonical_fields",
    "config_from_hf",
    "config_to_hf",
    "dropped_training_fields",
    "family_of",
    "ignored_keys",
    "rewrap_config",
    "unwrap_config",
    "wrapper_of",
]
