"""Conversations in a table by hand, each with the text that PLAIN and MARKED make of it; what counts in brackets."""

from __future__ import annotations

from typing import Any

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(text: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def said(role: str, text: str) -> str:
    """How the templates render a message."""
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def counted(text: str) -> str:
    """How they render a reply that counts."""
    return f"<|im_start|>assistant\n⟦{text}<|im_end|>⟧\n"


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "one turn": ({"messages": [user("Hi"), reply("Hello.")]}, said("user", "Hi") + counted("Hello.")),
    "several turns": (
        {"messages": [user("a"), reply("b"), user("c"), reply("d")]},
        said("user", "a") + counted("b") + said("user", "c") + counted("d"),
    ),
    "two replies in a row": (
        {"messages": [user("a"), reply("b"), reply("c")]},
        said("user", "a") + counted("b") + counted("c"),
    ),
    "two questions in a row": (
        {"messages": [user("a"), user("b"), reply("c")]},
        said("user", "a") + said("user", "b") + counted("c"),
    ),
    "a system turn": (
        {"messages": [{"role": "system", "content": "Be kind."}, user("a"), reply("b")]},
        said("system", "Be kind.") + said("user", "a") + counted("b"),
    ),
    "a system turn in the middle": (
        {"messages": [user("a"), reply("b"), {"role": "system", "content": "s"}, user("c"), reply("d")]},
        said("user", "a") + counted("b") + said("system", "s") + said("user", "c") + counted("d"),
    ),
    "a role of its own": (
        {"messages": [{"role": "developer", "content": "x"}, user("a"), reply("b")]},
        said("developer", "x") + said("user", "a") + counted("b"),
    ),
    "the reply first": (
        {"messages": [reply("Hello."), user("a"), reply("b")]},
        counted("Hello.") + said("user", "a") + counted("b"),
    ),
    "the question last": (
        {"messages": [user("a"), reply("b"), user("c")]},
        said("user", "a") + counted("b") + said("user", "c"),
    ),
    "an empty reply": ({"messages": [user("a"), reply("")]}, said("user", "a") + counted("")),
    "an empty question": ({"messages": [user(""), reply("b")]}, said("user", "") + counted("b")),
    "spaces at ends": (
        {"messages": [user("  a \n"), reply("b \n\n")]},
        said("user", "  a \n") + counted("b \n\n"),
    ),
    "texts that are not Latin": (
        {"messages": [user("Как дела? 你好"), reply("سلام 👋🏽 नमस्ते")]},
        said("user", "Как дела? 你好") + counted("سلام 👋🏽 नमस्ते"),
    ),
    "reasoning": (
        {"messages": [user("a"), reply("b", reasoning_content="hm")]},
        said("user", "a") + counted("<think>hm</think>b"),
    ),
    "reasoning by another name": (
        {"messages": [user("a"), reply("b", reasoning="hm")]},
        said("user", "a") + counted("<think>hm</think>b"),
    ),
    "reasoning in every turn": (
        {"messages": [user("a"), reply("b", reasoning_content="x"), user("c"), reply("d", reasoning_content="y")]},
        said("user", "a") + counted("<think>x</think>b") + said("user", "c") + counted("<think>y</think>d"),
    ),
    "a call without content": (
        {"messages": [user("a"), reply(None, tool_calls=[CALL])]},
        said("user", "a") + counted('<call>{"name": "add", "arguments": {"a": 1}}</call>'),
    ),
    "a call, its result, a reply": (
        {
            "messages": [
                user("a"),
                reply("", tool_calls=[CALL]),
                {"role": "tool", "content": "1"},
                reply("It is 1."),
            ]
        },
        said("user", "a")
        + counted('<call>{"name": "add", "arguments": {"a": 1}}</call>')
        + said("tool", "1")
        + counted("It is 1."),
    ),
    "two calls at once": (
        {"messages": [user("a"), reply("", tool_calls=[CALL, CALL])]},
        said("user", "a") + counted('<call>{"name": "add", "arguments": {"a": 1}}</call>' * 2),
    ),
    "a list of tools": (
        {"messages": [user("a"), reply("b")], "tools": TOOLS},
        said("tools", '[{"type": "function", "function": {"name": "add"}}]') + said("user", "a") + counted("b"),
    ),
    "content in parts": (
        {"messages": [user("a"), {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]},
        said("user", "a") + counted("b"),
    ),
    "a prompt and a completion": ({"prompt": "a", "completion": "b"}, said("user", "a") + counted("b")),
    "turns of from and value": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
        said("system", "s") + said("user", "a") + counted("b"),
    ),
    "a message that does not count": (
        {"messages": [user("a"), reply("b", weight=0), user("c"), reply("d", weight=1)]},
        said("user", "a") + said("assistant", "b") + said("user", "c") + counted("d"),
    ),
}
