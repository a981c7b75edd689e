"""Chat templates of our own, and a tokenizer that has their control tokens."""

from __future__ import annotations

from pathlib import Path

from longctx.tokenizer import Tokenizer, load_tokenizer
from tests.longctx.tokenizer.byte_level import tokenizer_json, write_tokenizer

START, STOP = "<|im_start|>", "<|im_end|>"

_TOOLS = "{%- if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif -%}"
_HEAD = "{{ '<|im_start|>' + message.role + '\n' }}"
_SAID = (
    "{%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif -%}"
    "{%- if message.content is string %}{{ message.content }}{% else -%}"
    "{%- for part in message.content or [] %}{{ part.text }}{% endfor -%}{% endif -%}"
    "{%- for call in message.tool_calls or [] %}{{ '<call>' + (call.function | tojson) + '</call>' }}{% endfor -%}"
    "{{ '<|im_end|>' }}"
)
_PROMPT = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"

PLAIN = f"{_TOOLS}{{%- for message in messages -%}}{_HEAD}{_SAID}{{{{ '\n' }}}}{{%- endfor -%}}{_PROMPT}"
"""Says nothing of what the model is to say."""
MARKED = (
    f"{_TOOLS}{{%- for message in messages -%}}{_HEAD}"
    f"{{%- if message.role == 'assistant' %}}{{% generation %}}{_SAID}{{% endgeneration %}}{{% else %}}{_SAID}"
    f"{{% endif -%}}{{{{ '\n' }}}}{{%- endfor -%}}{_PROMPT}"
)
"""The same, and says it by ``{% generation %}``."""
FORGETFUL = PLAIN.replace("message.reasoning_content %}", "message.reasoning_content and loop.last %}")
"""Drops the reasoning of all but the last message."""
STRICT = (
    "{%- if messages[0].role != 'user' %}{{ raise_exception('Begin with a question, not with ' + messages[0].role) }}"
    "{% endif -%}" + PLAIN
)
"""Refuses conversations that do not begin with a question."""


def chat_tokenizer(folder: Path, template: str | None = PLAIN) -> Tokenizer:
    """Write and load a tokenizer with the control tokens of these templates; ``template`` None is a base model's."""
    added = [(START, 261, True), (STOP, 262, True), ("<think>", 263, False), ("</think>", 264, False)]
    write_tokenizer(folder, tokenizer_json(*added))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(folder)
