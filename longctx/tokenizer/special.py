"""Ids that frame a document, from a model's files.

A document starts with the id that the tokenizer itself puts before a text (as transformers' ``tokenizer(text)`` does),
so that training, ``generate`` and an exported model start equally. It ends with the model's end token.

For a ``tokenizer.json`` the post-processor decides, independent of ``add_bos_token``: transformers 5.24 ignores the
setting if there is such a file. One tokenizer class ignores the post-processor too. For a SentencePiece model the
setting decides. ``remarks`` reports disagreements.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from longctx.errors import DataError
from longctx.untrusted.strict_json import parse_json

MODEL_FILE = "tokenizer.model"
JSON_FILE = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
GENERATION_CONFIG = "generation_config.json"
MODEL_CONFIG = "config.json"

_MOST_VALUES = 16_000_000
"""Maximum values in a tokenizer.json: a million vocabulary pieces, and as many merges in pairs, have a third of it."""

_UNFRAMED_CLASS = "GPTNeoXTokenizer"
"""transformers class that rebuilds the frame without begin and end."""

IdOf = Callable[[str], int | None]
"""Function from a token's text to its id; None for a token that the tokenizer does not have."""


class FimIds(NamedTuple):
    """Ids before a document's three parts for fill-in-the-middle."""

    prefix: int
    suffix: int
    middle: int


FIM_TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
"""Spelling in Qwen's models and ours."""
_FIM_VARIANTS = (
    FIM_TOKENS,
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),  # Codestral
)

SENTINEL = "<extra_id_{}>"
"""Spelling in T5 and our models, numbered from 0."""
MASK_TOKEN = "[MASK]"
"""Spelling in BERT's models and ours."""
_MASK_VARIANTS = (MASK_TOKEN, "<mask>")


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Settings in each file for the ids around a text."""

    file: str = ""
    """The tokenizer's own file."""
    before: int | None = None
    """Id that this file puts before a text: from the post-processor, or a SentencePiece model's begin id."""
    after: int | None = None
    """Id that it puts after a text, or a SentencePiece model's end id."""
    is_only_form: bool = False
    """True if a Hugging Face folder has only the SentencePiece model, which transformers then reads."""
    adds_bos: bool | None = None
    """``add_bos_token`` in tokenizer_config.json; None if missing."""
    adds_eos: bool | None = None
    unframed_class: str = ""
    """``tokenizer_class`` if it ignores the post-processor and puts no id before a text; otherwise empty."""


@dataclass(frozen=True, kw_only=True)
class SpecialIds:
    """Ids that do not represent text."""

    bos: int | None
    """Begin token named in the files, whether or not documents start with it."""
    begin: int | None
    """Put before a document; None if the tokenizer puts no id there."""
    end: int | None
    """Put after a document."""
    padding: int | None
    stop_ids: tuple[int, ...]
    """Ids that end a generated text: ``end``, and further ones from generation_config.json."""
    frame: Frame = Frame()
    fim: FimIds | None = None
    """Fill-in-the-middle ids, if the tokenizer has all three."""
    mask: int | None = None
    """Replaces a masked token."""
    sentinels: tuple[int, ...] = ()
    """Replace spans taken out of a text, in order of use."""
    start: int | None = None
    """First target id for a model with an encoder, if its files contain one (``decoder_start_token_id``)."""
    forced_begin: int | None = None
    """Id that transformers' generation always puts first for such a model (``forced_bos_token_id``); for exports."""
    forced_end: int | None = None
    """Id that it puts last if a text has no end (``forced_eos_token_id``)."""


def special_ids(
    files: Mapping[str, bytes],
    id_of: IdOf,
    *,
    path: Path,
    file: str,
    bos: int | None = None,
    begin: int | None = None,
    end: int | None = None,
    padding: int | None = None,
) -> SpecialIds:
    """Resolve the ids from a folder's ``files``; ``bos`` … ``padding``, from the model's own file, are the defaults.

    ``file`` is the model's own; ``begin`` is the id that it puts before a text unless a setting overrides it.
    """
    frame = _frame(files, file, begin, end, path)
    own = {"bos": bos, "eos": end, "pad": padding}
    for role in own:
        named = _named_id(role, files, id_of, path)
        if named is not None:
            own[role] = named
    own_begin = begin
    # transformers rebuilds a SentencePiece model's frame as soon as one of the two settings is present.
    if JSON_FILE not in files and (frame.adds_bos is not None or frame.adds_eos is not None):
        own_begin = None
        if frame.adds_bos:
            own_begin = own["bos"]
    if JSON_FILE in files and frame.unframed_class:
        own_begin = None
    # Chat models often list an end of turn in addition to the end of text.
    stop_ids = [own["eos"], *_configured_ids("eos", files, path)]
    return SpecialIds(
        bos=own["bos"],
        begin=own_begin,
        end=own["eos"],
        padding=own["pad"],
        stop_ids=tuple(dict.fromkeys(token for token in stop_ids if token is not None)),
        frame=frame,
        fim=_fim_ids(id_of),
        mask=_mask_id(files, id_of, path),
        sentinels=_sentinel_ids(id_of),
        start=_first_id("decoder_start", files, path),
        forced_begin=_first_id("forced_bos", files, path),
        forced_end=_first_id("forced_eos", files, path),
    )


def _frame(files: Mapping[str, bytes], file: str, begin: int | None, end: int | None, path: Path) -> Frame:
    """Return the settings for begin and end in the model's own file and in tokenizer_config.json."""
    settings = read_tokenizer_json(files, TOKENIZER_CONFIG, path)
    # A missing setting differs from an explicit false.
    adds = {role: bool(settings[key]) for role in ("bos", "eos") if (key := f"add_{role}_token") in settings}
    return Frame(
        file=file,
        before=begin,
        after=end,
        is_only_form=JSON_FILE not in files and (TOKENIZER_CONFIG in files or MODEL_CONFIG in files),
        adds_bos=adds.get("bos"),
        adds_eos=adds.get("eos"),
        unframed_class=_unframed_class(settings),
    )


def _unframed_class(settings: Mapping[str, Any]) -> str:
    name = str(settings.get("tokenizer_class", "")).removesuffix("Fast")
    if name == _UNFRAMED_CLASS:
        return name
    return ""


def _fim_ids(id_of: IdOf) -> FimIds | None:
    """Return the ids for the first spelling with all three tokens."""
    for variant in _FIM_VARIANTS:
        found = [token for token in map(id_of, variant) if token is not None]
        if len(found) == len(variant):
            return FimIds(*found)
    return None


def _mask_id(files: Mapping[str, bytes], id_of: IdOf, path: Path) -> int | None:
    """Return the mask id named in the files, otherwise the first with a common spelling."""
    named = _named_id("mask", files, id_of, path)
    if named is not None:
        return named
    return next((token for token in map(id_of, _MASK_VARIANTS) if token is not None), None)


def _sentinel_ids(id_of: IdOf) -> tuple[int, ...]:
    """Return the ids of all sentinels, from the first on."""
    found = []
    while (token := id_of(SENTINEL.format(len(found)))) is not None:
        found.append(token)
    return tuple(found)


def with_generation_config(files: Mapping[str, bytes], path: Path) -> dict[str, bytes]:
    """Return the files to copy, without config.json; its ids go into generation_config.json if that file is missing."""
    copied = {name: content for name, content in files.items() if name != MODEL_CONFIG}
    if MODEL_CONFIG in files and GENERATION_CONFIG not in files:
        config = read_tokenizer_json(files, MODEL_CONFIG, path)
        names = ("bos", "eos", "pad", "decoder_start", "forced_bos", "forced_eos")
        keys = [f"{name}_token_id" for name in names]
        ids = {key: config[key] for key in keys if config.get(key) is not None}
        if ids:
            copied[GENERATION_CONFIG] = (json.dumps(ids, indent=2) + "\n").encode()
    return copied


def read_tokenizer_json(files: Mapping[str, bytes], name: str, path: Path) -> dict[str, Any]:
    """Return the JSON object in one of the files, empty if it is missing; raise DataError if it is not an object."""
    if name not in files:
        return {}
    try:
        content = parse_json(files[name], most_values=_MOST_VALUES)
    except ValueError as error:
        raise DataError(f"tokenizer={path}: its {name} cannot be read: {error}. Copy it again.") from error
    if not isinstance(content, dict):
        raise DataError(f"tokenizer={path}: its {name} is not a JSON object. Copy it again.")
    return content


def _named_id(role: str, files: Mapping[str, bytes], id_of: IdOf, path: Path) -> int | None:
    """Return a role's id by the token's text, otherwise by the number in the model's settings."""
    order = [SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG]
    # As in transformers: the older file applies unless the settings list the added tokens themselves.
    if "added_tokens_decoder" in read_tokenizer_json(files, TOKENIZER_CONFIG, path):
        order.reverse()
    for name in order:
        token = read_tokenizer_json(files, name, path).get(f"{role}_token")
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found = id_of(token)
            if found is not None:
                return found
    configured = _configured_ids(role, files, path)
    if configured:
        return configured[0]
    return None


def _first_id(role: str, files: Mapping[str, bytes], path: Path) -> int | None:
    return next(iter(_configured_ids(role, files, path)), None)


def _configured_ids(role: str, files: Mapping[str, bytes], path: Path) -> list[int]:
    """Return a role's ids in generation_config.json, otherwise in config.json: either may list several."""
    for name in (GENERATION_CONFIG, MODEL_CONFIG):
        value = read_tokenizer_json(files, name, path).get(f"{role}_token_id")
        if isinstance(value, int):
            value = [value]
        if isinstance(value, list) and value:
            # −1 means that the model has no such id (pad_token_id in the first Llama models).
            return [token for token in value if isinstance(token, int) and token >= 0]
    return []
