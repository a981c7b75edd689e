"""``ChatTemplate``: renders conversations as text by a model's template.

A template is an untrusted program. It runs in its own process (``template_worker``), in Jinja's sandbox, with limits on
memory and CPU time: an attack that no Python sandbox can stop ends only that process.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from longctx.errors import DataError
from longctx.untrusted.strict_json import printable

MAX_TEMPLATE_CHARACTERS = 1 << 20
"""Template length limit in characters. The longest published ones have some 20,000."""
OWN_VARIABLES = frozenset(("messages", "tools", "documents", "add_generation_prompt", "beginnings"))
"""Template variables that each conversation sets; options cannot override them."""
_SHOWN_CHARACTERS = 300
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_WORKER = Path(__file__).with_name("template_worker.py")
_REASONS = {
    "memory": "exceeds the memory limit per conversation",
    "depth": "is nested too deeply",
    "syntax": "is not a valid template",
    "sandbox": "attempts a forbidden operation",
}

Message = Mapping[str, Any]
"""A turn: ``role``, ``content`` and any other JSON values that the template reads."""


class TemplateError(DataError):
    """Error for a template that rejects a conversation, or that is rejected itself."""

    def __init__(self, text: str, reason: str = "", *, rejects_conversation: bool = False) -> None:
        super().__init__(text)
        self.reason = reason or text
        """Short reason, without the hint."""
        self.rejects_conversation = rejects_conversation
        """True if the template itself rejects this conversation: another one may pass."""


class RenderedChat(NamedTuple):
    """A conversation as text."""

    text: str
    spans: list[tuple[int, int]] | None
    """Character spans marked by ``{% generation %}``, in order; None if a macro or stored block contains a mark,
    because its text appears at another position."""
    prefix_lengths: list[int | str]
    """Per requested beginning: its text length if the full text starts with it, "" if not, or an error message."""


class ChatTemplate:
    """Chat template, rendered by a separate process that starts with the first conversation.

    For use by one thread. A forked process starts its own worker.
    """

    def __init__(self, text: str, *, name: str = "the chat template", now: datetime.datetime | None = None) -> None:
        """Set the template's ``name`` for messages, and the time ``now`` for its ``strftime_now``."""
        self.text, self.name = text, name
        self.now = now or datetime.datetime.now()
        self.has_reply_marks = _GENERATION.search(text) is not None
        """True if it marks replies by ``{% generation %}``."""
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = -1
        if len(text) > MAX_TEMPLATE_CHARACTERS:
            raise self._close_with_error(f"has {len(text):,} characters; the limit is {MAX_TEMPLATE_CHARACTERS:,}")

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
        prefixes: Sequence[tuple[int, bool]] = (),
    ) -> RenderedChat:
        """Render a conversation as text. Raise TemplateError if the template rejects it, fails or exceeds its limits.

        ``variables`` are other template inputs, such as ``bos_token`` or ``enable_thinking``. ``prefixes`` lists
        message counts, each with or without a prompt for the next reply: their text is compared with the full text.
        """
        values = {
            "messages": list(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "beginnings": list(prefixes),
        }
        answer = self._request(json.dumps({**(variables or {}), **values}))
        spans = None
        if answer["spans"] is not None:
            spans = [(start, stop) for start, stop in answer["spans"]]
        return RenderedChat(answer["text"], spans, answer["beginnings"])

    def close(self) -> None:
        """Stop the process, if it is running."""
        if self._process is not None and self._owner == os.getpid():
            _end(self._process)
        self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, line: str) -> dict[str, Any]:
        """Send a JSON line and return the answer; start the process if it is not running."""
        # After a fork, the pipes still belong to the parent process.
        if self._process is None or self._owner != os.getpid():
            self._start()
        return self._exchange(line)

    def _start(self) -> None:
        # Without the environment: a template that escapes the sandbox finds no keys in it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
        )
        self._owner = os.getpid()
        # Stops the worker even without close().
        weakref.finalize(self, _end, self._process)
        self._exchange(json.dumps({"template": self.text, "now": self.now.isoformat()}))

    def _exchange(self, line: str) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
            content = process.stdout.readline()
        except BrokenPipeError:
            content = b""
        # A worker that dies, for example at its CPU limit, leaves no complete line.
        if not content.endswith(b"\n"):
            code = process.wait()
            self._process = None
            raise self._close_with_error(_exit_reason(code))
        answer = json.loads(content)
        kind = answer.get("error")
        if kind is None:
            return answer
        message = printable(answer.get("message", ""))[:_SHOWN_CHARACTERS]
        if kind == "template":
            raise TemplateError(f"{self.name} rejects the conversation: {message}", message, rejects_conversation=True)
        raise self._close_with_error(": ".join(part for part in (_REASONS[kind], message) if part))

    def _close_with_error(self, reason: str) -> TemplateError:
        """Stop the process, and return the error for a template that cannot be used."""
        # A template that fails once is not used again: after running out of memory, the process has an unknown state.
        self.close()
        return TemplateError(
            f"{self.name} {reason}.\nUse the model publisher's template, or another one: --chat-template FILE.",
            reason,
        )


def render_chat(template: str, messages: Sequence[Message], **values: Any) -> str:
    """Render one conversation by a template's text. Raise TemplateError as ``ChatTemplate`` does."""
    with ChatTemplate(template) as chat:
        return chat.render(messages, **values).text


def _exit_reason(code: int) -> str:
    """Return why the process ended, for a message."""
    if code == -signal.SIGXCPU:
        return "exceeds the CPU time limit per conversation"
    if code < 0:
        return f"crashed its rendering process (signal {-code})"
    return f"crashed its rendering process (exit code {code})"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
