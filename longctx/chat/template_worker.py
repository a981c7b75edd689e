"""Renderer for untrusted chat templates: the worker program that ``template`` starts and limits.

It reads and writes JSON lines. The first line is the template; each later line is one conversation. It does not import
this project, so that it starts in a tenth of a second and holds no secrets.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import resource
import sys
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.debug  # imported now: later, there may be no memory for it
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

_MEMORY_BYTES = 256 * 2**20
"""Bytes beyond the memory that Python and Jinja have taken."""
_MEMORY_PER_CHARACTER = 64
"""Additional bytes per character in a conversation."""
_SECONDS, _CHARACTERS_PER_SECOND = 1, 1 << 20
"""CPU seconds per conversation, and the characters that add one more."""
_FORBIDDEN = "_"
"""Prefix of names that a template may not store."""


class GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` … ``{% endgeneration %}``: marks the model's reply."""

    tags = {"generation"}  # noqa: RUF012  as the base class declares it

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        environment.extend(blocks=[], marks=[])

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        """Return the node that records its body's position in the text."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_record"), [], [], body).set_lineno(line)

    def _record(self, caller: Callable[[], str]) -> str:
        content = caller()
        environment: Any = self.environment
        environment.marks.append((sum(map(len, environment.blocks)), content))
        return content


# Rendering follows transformers 5.24: the same sandbox, options, filters and functions. An attribute that Jinja's
# sandbox hides is an immediate error here, not a value that prints as empty.
class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with an error on access to a hidden attribute, even if the value is unused."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Raise SecurityError for a hidden attribute."""
        raise jinja2.sandbox.SecurityError(f"it reads the attribute {attribute!r} of a {type(obj).__name__}")


class Namespace(jinja2.utils.Namespace):
    """Variables that outlive a loop; names with a leading underscore are rejected."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class Dictionaries:
    """``dict`` as templates call it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return a dictionary with these keys."""
        return dict.fromkeys(*args)


def environment(now: datetime.datetime) -> Any:
    """Build the sandbox with the functions that ``transformers`` templates may call."""
    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols])
    sandbox.filters["tojson"] = _to_json
    sandbox.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": now.strftime,
        "dict": Dictionaries(),
        "namespace": Namespace,
    }
    return sandbox


def main() -> None:
    """Answer requests until the input ends."""
    # A template may write no files, and a crash no core dump.
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    # RLIMIT_AS limits address space, which exceeds resident memory (in KiB here); 2**28 bytes cover the difference.
    own_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + 2**28
    first = json.loads(sys.stdin.readline())
    _allow(own_bytes, len(first["template"]))
    sandbox = environment(datetime.datetime.fromisoformat(first["now"]))
    template: Any = None

    def compile_it() -> dict[str, Any]:
        nonlocal template
        template = sandbox.from_string(first["template"])
        return {}

    _answer(compile_it)
    for line in sys.stdin:
        _allow(own_bytes, len(line))
        values = json.loads(line)
        _allow(own_bytes, len(line), 1 + len(values["beginnings"]))
        _answer(lambda values=values: _render(sandbox, template, values))


def _render(sandbox: Any, template: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Render a conversation; return its text, marked character spans, and the lengths of its beginnings.

    Spans are None if a mark is not at its text's position. ``prefixes`` lists message counts, each with or without a
    prompt for the next reply; the result for each is its text length, "" if the full text starts differently, or an
    error message.
    """
    prefixes = values.pop("beginnings")
    text, spans = _text_of(sandbox, template, values)
    prefix_lengths: list[int | str] = []
    for num_messages, prompts in prefixes:
        # This text is empty, and many templates would fail on it.
        if not num_messages and not prompts:
            prefix_lengths.append(0)
            continue
        part = {**values, "messages": values["messages"][:num_messages], "add_generation_prompt": prompts}
        try:
            prefix_text, _ = _text_of(sandbox, template, part)
        except jinja2.sandbox.SecurityError:
            # A sandbox violation disqualifies the template, not only this conversation.
            raise
        except jinja2.TemplateError as error:
            prefix_lengths.append(f"the template rejects the messages up to it: {error}")
            continue
        if text.startswith(prefix_text):
            prefix_lengths.append(len(prefix_text))
        else:
            prefix_lengths.append("")
    return {"text": text, "spans": spans, "beginnings": prefix_lengths}


def _text_of(sandbox: Any, template: Any, values: dict[str, Any]) -> tuple[str, list[tuple[int, int]] | None]:
    sandbox.blocks.clear()
    sandbox.marks.clear()
    for block in template.generate(**values):
        sandbox.blocks.append(block)
    text = "".join(sandbox.blocks)
    # Text marked in a macro or {% set %} is written later, at another position.
    if any(not text.startswith(content, start) for start, content in sandbox.marks):
        return text, None
    return text, [(start, start + len(content)) for start, content in sandbox.marks]


def _answer(action: Callable[[], dict[str, Any]]) -> None:
    """Write an action's result, or the exception that it raises."""
    try:
        answer = action()
        line = json.dumps(answer)
    except MemoryError:
        line = json.dumps({"error": "memory"})
    except RecursionError:
        line = json.dumps({"error": "depth"})
    except jinja2.TemplateSyntaxError as error:
        line = json.dumps({"error": "syntax", "message": f"line {error.lineno}: {error.message}"})
    except jinja2.sandbox.SecurityError as error:
        line = json.dumps({"error": "sandbox", "message": str(error)})
    except jinja2.TemplateError as error:
        line = json.dumps({"error": "template", "message": str(error)})
    except Exception as error:  # a template may divide by zero, or call a list
        line = json.dumps({"error": "template", "message": f"{type(error).__name__}: {error}"})
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _allow(own_bytes: int, characters: int, times: int = 1) -> None:
    """Limit memory and CPU time for rendering so many characters, ``times`` times."""
    _limit(resource.RLIMIT_AS, own_bytes + _MEMORY_BYTES + characters * _MEMORY_PER_CHARACTER)
    used = resource.getrusage(resource.RUSAGE_SELF)
    # RLIMIT_CPU counts from the start of the process.
    seconds = used.ru_utime + used.ru_stime + _SECONDS + times * characters / _CHARACTERS_PER_SECOND
    _limit(resource.RLIMIT_CPU, int(seconds) + 1)


def _limit(resource_kind: int, limit: int) -> None:
    # Only the soft limit, so that the next conversation can raise it.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource_kind, (limit, resource.getrlimit(resource_kind)[1]))


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith(_FORBIDDEN):
        raise jinja2.sandbox.SecurityError(f"it stores {name!r} in a namespace")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    main()
