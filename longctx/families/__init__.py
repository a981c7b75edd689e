"""One table per family: which config.json keys and disk tensors match a decoder's fields and parameters.

A table serves both directions. Its ``rules`` for keys and fields (``spec.Rule``) read a config.json and write it. A
family supports a model if its written config.json reads back as the same function (``config_json.lost_fields``), so no
field without a key is ever lost. Parameters have the decoder's names on disk, which are Llama's, unless a
``spec.TensorRule`` gives another form: renamed, transposed, one tensor per expert, several in one tensor.
"""

from longctx.families.config_json import (
    auto_class,
    config_from_hf,
    config_to_hf,
    effective,
    family_of,
    left_behind,
    passed_over,
)
from longctx.families.spec import Family
from longctx.families.table import FAMILIES
from longctx.families.wrapped import ALIASES, WRAPPERS, rewrapped, unwrapped, wrapper_of

__all__ = [
    "ALIASES",
    "FAMILIES",
    "WRAPPERS",
    "Family",
    "auto_class",
    "config_from_hf",
    "config_to_hf",
    "effective",
    "family_of",
    "left_behind",
    "passed_over",
    "rewrapped",
    "unwrapped",
    "wrapper_of",
]
