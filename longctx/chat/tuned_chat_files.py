"""Chat files for a tuned model: the chat template used in training, and the ids that end a reply."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from longctx.chat.chat_encoder import ChatEncoder, template_variables
from longctx.chat.chat_rule import ChatRule
from longctx.chat.template_files import DEFAULT, find_chat_templates
from longctx.chat.turn_ends import turn_ends
from longctx.tokenizer.chat_templates import TEMPLATE_FILE, TEMPLATES, is_template
from longctx.tokenizer.special import GENERATION_CONFIG, TOKENIZER_CONFIG, read_tokenizer_json
from longctx.tokenizer.tokenizer_base import Tokenizer

logger = logging.getLogger(__name__)

_ENDS, _SPLITS = "eos_token_id", "split_special_tokens"


def with_chat(tokenizer: Tokenizer, rule: ChatRule, say: Callable[[str], None] = logger.info) -> Tokenizer:
    """Return the tokenizer with the rule's template in its files, and with the ids that end a reply.

    ``say`` receives a warning if the template does not end replies with a control token.

    Generation stops at ``eos_token_id`` in generation_config.json: without the template's own turn end there, a tuned
    model would continue and ask itself the next question.
    """
    chat_tokenizer = copy.copy(tokenizer)
    chat_tokenizer.files = _with_control_tokens(tokenizer.files, tokenizer.path)
    if rule.template is not None or rule.options:
        chat_tokenizer.files = _with_templates(chat_tokenizer.files, _texts(tokenizer, rule))
    encoder = ChatEncoder(tokenizer, rule)
    try:
        ends = turn_ends(encoder)
    finally:
        encoder.close()
    if not ends:
        say("the chat template ends no reply with a control token: the model does not learn to end its replies")
    # Without an end id, the tokenizer must stay so: an id that ends replies would also end plain texts, which changes
    # their ids.
    if tokenizer.special.end is None:
        return chat_tokenizer
    # The first id stays first: it follows a plain text document.
    end_ids = dict.fromkeys(list(tokenizer.special.stop_ids) + sorted(ends))
    chat_tokenizer.files = _with_end_ids(chat_tokenizer.files, list(end_ids), tokenizer.path)
    return chat_tokenizer


def _texts(tokenizer: Tokenizer, rule: ChatRule) -> dict[str, str]:
    """Return the rule's templates by name, each starting with the rule's options as defaults that a caller may
    override.

    Special tokens are set without such a check: every program passes the tokenizer's own.
    """
    texts = {DEFAULT: rule.template or ""}
    if rule.template is None:
        texts = find_chat_templates(tokenizer.files, tokenizer.path)
    own = template_variables(tokenizer)
    defaults = ""
    for name, value in rule.options.items():
        given = f"{{% set {name} = {_token_text(value)} %}}"
        if name not in own:
            given = f"{{% if {name} is not defined %}}{given}{{% endif %}}"
        defaults += given
    # Jinja drops the line break after a tag, so the template still begins on a new line.
    begin = defaults and f"{defaults}\n"
    return {name: begin + text for name, text in texts.items()}


def _token_text(value: Any) -> str:
    """Return a JSON value as a Jinja literal."""
    if value is None:
        return "none"
    if isinstance(value, list):
        return f"[{', '.join(map(_token_text, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{json.dumps(key)}: {_token_text(item)}' for key, item in value.items())}}}"
    return json.dumps(value, ensure_ascii=False)


def _with_templates(files: Mapping[str, bytes], texts: Mapping[str, str]) -> dict[str, bytes]:
    """Return the files with these templates replacing all template files."""
    found = {name: content for name, content in files.items() if name != TEMPLATE_FILE and not is_template(name)}
    for name, text in texts.items():
        file = f"{TEMPLATES}.{name}.jinja"
        if name == DEFAULT:
            file = TEMPLATE_FILE
        found[file] = text.encode()
    return found


def tuned_files(own: Mapping[str, bytes], data: Mapping[str, bytes], path: Path) -> dict[str, bytes]:
    """Return a model's ``own`` files, with the chat template and reply end ids from ``data``."""
    files = _with_templates(own, find_chat_templates(data, path))
    # The model's own ends come first: the first id also follows plain text documents.
    ends = _end_ids(own, path) + _end_ids(data, path)
    return _with_end_ids(_with_control_tokens(files, path), list(dict.fromkeys(ends)), path)


def _with_control_tokens(files: Mapping[str, bytes], path: Path) -> dict[str, bytes]:
    """Return the files with transformers set to read control tokens in rendered text instead of splitting them."""
    settings = read_tokenizer_json(files, TOKENIZER_CONFIG, path)
    if not settings.get(_SPLITS):
        return dict(files)
    return {**files, TOKENIZER_CONFIG: (json.dumps({**settings, _SPLITS: False}, indent=2) + "\n").encode()}


def _end_ids(files: Mapping[str, bytes], path: Path) -> list[int]:
    found = read_tokenizer_json(files, GENERATION_CONFIG, path).get(_ENDS)
    if isinstance(found, int):
        return [found]
    if isinstance(found, list):
        return [token for token in found if isinstance(token, int)]
    return []


def _with_end_ids(files: Mapping[str, bytes], ends: list[int], path: Path) -> dict[str, bytes]:
    """Return the files with these ids as generation ends; unchanged if they are set already."""
    settings = read_tokenizer_json(files, GENERATION_CONFIG, path)
    if not ends or _end_ids(files, path) == ends:
        return dict(files)
    settings[_ENDS] = ends
    return {**files, GENERATION_CONFIG: (json.dumps(settings, indent=2) + "\n").encode()}
