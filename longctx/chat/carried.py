"""What a tuned model carries: the chat template that it was trained with, and the ids that end a reply."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path

from longctx.chat.encode import ChatEncoder
from longctx.chat.rule import ChatRule
from longctx.chat.template_files import DEFAULT, find_templates
from longctx.tokenizer.contract import Tokenizer
from longctx.tokenizer.special import GENERATION_CONFIG, TOKENIZER_CONFIG, read_object
from longctx.tokenizer.templates import TEMPLATE_FILE, TEMPLATES, is_template

_ENDS, _SPLITS = "eos_token_id", "split_special_tokens"


def with_chat(tokenizer: Tokenizer, rule: ChatRule) -> Tokenizer:
    """Return the tokenizer with the rule's template among its files, and with the ids that end a reply.

    A program that generates ends at ``eos_token_id`` of generation_config.json: without a template's own end of turn
    there, a tuned model would go on and ask itself the next question.
    """
    changed = copy.copy(tokenizer)
    changed.files = dict(tokenizer.files)
    if rule.template is not None:
        changed.files[TEMPLATE_FILE] = rule.template.encode()
    encoder = ChatEncoder(tokenizer, rule)
    try:
        ends = encoder.turn_ends()
    finally:
        encoder.close()
    # The first one stays the first: it is what follows a document of text.
    stops = dict.fromkeys(list(tokenizer.special.stops) + sorted(ends))
    changed.files = _ending(_reading(changed.files, tokenizer.path), list(stops), tokenizer.path)
    return changed


def tuned_files(own: Mapping[str, bytes], data: Mapping[str, bytes], path: Path) -> dict[str, bytes]:
    """Return a model's ``own`` files, with the chat template and the ends of replies of the ``data``."""
    files = {name: content for name, content in own.items() if name != TEMPLATE_FILE and not is_template(name)}
    for name, text in find_templates(data, path).items():
        file = f"{TEMPLATES}.{name}.jinja"
        if name == DEFAULT:
            file = TEMPLATE_FILE
        files[file] = text.encode()
    ends = _ends(own, path) + _ends(data, path)
    return _ending(_reading(files, path), list(dict.fromkeys(ends)), path)


def _reading(files: Mapping[str, bytes], path: Path) -> dict[str, bytes]:
    """Return the files with which transformers reads the control tokens that a template wrote, and no text of them."""
    settings = read_object(files, TOKENIZER_CONFIG, path)
    if not settings.get(_SPLITS):
        return dict(files)
    return {**files, TOKENIZER_CONFIG: (json.dumps({**settings, _SPLITS: False}, indent=2) + "\n").encode()}


def _ends(files: Mapping[str, bytes], path: Path) -> list[int]:
    found = read_object(files, GENERATION_CONFIG, path).get(_ENDS)
    if isinstance(found, int):
        return [found]
    if isinstance(found, list):
        return [token for token in found if isinstance(token, int)]
    return []


def _ending(files: Mapping[str, bytes], ends: list[int], path: Path) -> dict[str, bytes]:
    """Return the files with these ids as the ends of a generated text; as they are if these are known."""
    settings = read_object(files, GENERATION_CONFIG, path)
    if not ends or _ends(files, path) == ends:
        return dict(files)
    settings[_ENDS] = ends
    return {**files, GENERATION_CONFIG: (json.dumps(settings, indent=2) + "\n").encode()}
