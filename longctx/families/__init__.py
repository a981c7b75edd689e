"""One table a family: which keys of config.json and which tensors on disk a decoder's fields and parameters are.

A table serves both directions. ``rules`` of keys and fields (``spec.Rule``) read a config.json and write it; a family
can be a model if what it writes reads back as the same function (``configs.unsaid``), so a field without a key is never
lost. Parameters have the decoder's names on disk, which are Llama's, unless a ``spec.TensorRule`` says otherwise:
renamed, transposed, cut into a tensor an expert, several in one tensor.
"""

from longctx.conversion.families.configs import config_from_hf, config_to_hf, effective, family_of
from longctx.conversion.families.spec import Family
from longctx.conversion.families.table import FAMILIES
from longctx.conversion.families.tensors import (
    EMBEDDINGS,
    HEAD,
    Layout,
    Part,
    TensorSpec,
    assemble,
    disassemble,
    ignored_name,
    parameter_shapes,
    tensor_specs,
)

__all__ = [
    "EMBEDDINGS",
    "FAMILIES",
    "HEAD",
    "Family",
    "Layout",
    "Part",
    "TensorSpec",
    "assemble",
    "config_from_hf",
    "config_to_hf",
    "disassemble",
    "effective",
    "family_of",
    "ignored_name",
    "parameter_shapes",
    "tensor_specs",
]
