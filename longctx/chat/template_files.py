"""Chat templates in a tokenizer's files, and the variables that they read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from longctx.errors import DataError
from longctx.tokenizer.chat_templates import TEMPLATE_FILE, TEMPLATES
from longctx.tokenizer.special import SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG, read_tokenizer_json
from longctx.tokenizer.tokenizer_base import Tokenizer

_OLD_FILE = "chat_template.json"
DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Template names: the default one, and the one for conversations with tools."""


def find_chat_templates(files: Mapping[str, bytes], path: Path) -> dict[str, str]:
    """Return a tokenizer's templates by name, empty if it has none. Raise DataError if one is not text.

    As in transformers, separate template files take precedence over ``tokenizer_config.json``.
    """
    found: dict[str, str] = {}
    value = read_tokenizer_json(files, TOKENIZER_CONFIG, path).get("chat_template")
    if value is None:
        value = read_tokenizer_json(files, _OLD_FILE, path).get("chat_template")
    if isinstance(value, str):
        found[DEFAULT] = value
    elif isinstance(value, list):
        found |= {str(one["name"]): str(one["template"]) for one in value if _is_named(one)}
    elif value is not None:
        raise DataError(f"{TOKENIZER_CONFIG} of tokenizer={path} has a chat_template that is not text. Copy it again.")
    own = {name: content for name, content in files.items() if name.startswith(f"{TEMPLATES}.")}
    own |= {f"{TEMPLATES}.{DEFAULT}.jinja": files[TEMPLATE_FILE]} if TEMPLATE_FILE in files else {}
    # Separate files replace all templates in the config, not only those with the same name.
    if own:
        found = {}
    for name, content in own.items():
        try:
            found[name.removeprefix(f"{TEMPLATES}.").removesuffix(".jinja")] = content.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{name} of tokenizer={path} is not UTF-8 ({error.reason}). Copy it again.") from error
    return found


def has_template(tokenizer: Tokenizer) -> bool:
    """Return True if a tokenizer has a chat template, readable or not."""
    try:
        return bool(find_chat_templates(tokenizer.files, tokenizer.path))
    except DataError:
        return True


def hash_templates(files: Mapping[str, bytes], path: Path) -> str:
    """Hash a tokenizer's templates."""
    return xxhash.xxh3_128_hexdigest(repr(sorted(find_chat_templates(files, path).items())).encode())


def special_token_variables(files: Mapping[str, bytes], path: Path) -> dict[str, Any]:
    """Return special tokens as template variables: ``bos_token``, ``eos_token`` and the others."""
    found: dict[str, Any] = {}
    names = [TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP]
    # The file read last wins. A config with added_tokens_decoder is complete; older ones rely on the special tokens
    # map.
    if "added_tokens_decoder" in read_tokenizer_json(files, TOKENIZER_CONFIG, path):
        names.reverse()
    for name in names:
        for key, value in read_tokenizer_json(files, name, path).items():
            if isinstance(value, Mapping):
                value = value.get("content")
            if key.endswith("_token") and isinstance(value, str):
                found[key] = value
    return found


def _is_named(one: Any) -> bool:
    return isinstance(one, Mapping) and isinstance(one.get("name"), str) and isinstance(one.get("template"), str)
