"""What is right for a prompt, read from the prompt alone: a solver for each task, which knows its text and no code."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable

from longctx.evaluation import GROUPS


def _needle(prompt: str) -> list[str]:
    """Codes of the keys that the question names."""
    (asked,) = re.findall(r"Question: What (?:is the secret code|are all the secret codes) of (.*)\?\n", prompt)
    pairs = re.findall(r"The secret code of (\S+) is (\S+)\.(?:\s|$)", prompt)
    return [code for key in asked.split(", ") for name, code in pairs if name == key]


def _passkey(prompt: str) -> list[str]:
    return re.findall(r"pass key is (\d{5})\.", prompt)


def _kv(prompt: str) -> list[str]:
    start, end = prompt.index("{"), prompt.rindex("}")
    (key,) = re.findall(r'The value of the key "(.*)" is$', prompt)
    return [json.loads(prompt[start : end + 1])[key]]


def _phonebook(prompt: str) -> list[str]:
    (name,) = re.findall(r"The telephone number of (.*) is$", prompt)
    return re.findall(rf"^{name}: (\S+)$", prompt, re.M)


def _edges(prompt: str) -> list[tuple[str, str]]:
    return re.findall(r"^(\S+) -> (\S+)$", prompt.partition("Graph:\n")[2], re.M)


def _bfs(prompt: str) -> list[str]:
    """By distances of all nodes, relaxed edge by edge until nothing changes."""
    start, steps = re.findall(r"reached from (\S+) in exactly (\d) steps", prompt)[-1]
    distance = {start: 0}
    changed = True
    while changed:
        changed = False
        for node, child in _edges(prompt):
            if node in distance and distance[node] + 1 < distance.get(child, 1 << 30):
                distance[child] = distance[node] + 1
                changed = True
    return sorted(node for node, far in distance.items() if far == int(steps))


def _parents(prompt: str) -> list[str]:
    wanted = re.findall(r"leads to (\S+)\?", prompt)[-1]
    return sorted(node for node, child in _edges(prompt) if child == wanted)


def _numbered_request(prompt: str) -> list[str]:
    ordinal, kind, topic, code = re.findall(
        r"Write the (\w+) (\w+) about the (\w+) again, word for word. Write (\w+) before it.", prompt
    )[0]
    written = re.findall(rf"User: Write a {kind} about the {topic}\.\nAssistant: (.*)\n", prompt)
    return [f"{code} {written[['first', 'second', 'third', 'fourth'].index(ordinal)]}", code]


def _copy(prompt: str) -> list[str]:
    sequence, cue = prompt.split("\n\n")
    words = sequence.split(" ")
    at = words.index(cue.split(" ")[0])
    assert words[at : at + 4] == cue.split(" ")
    return [" ".join(words[at + 4 : at + 12])]


def _recall(prompt: str) -> list[str]:
    pairs, key = prompt.split("\n\n")
    return [dict(pair.split(" ") for pair in pairs.split(", "))[key]]


def _ruler_needle(prompt: str) -> list[str]:
    (asked,) = re.findall(
        r"What (?:is|are all) the special magic \w+ for (.*) mentioned in the provided text\?", prompt
    )
    pairs = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", prompt)
    return [value for key in re.split(r", and |, ", asked) for name, value in pairs if name == key]


def _variables(prompt: str) -> list[str]:
    """Follow the chain of the last text."""
    text, question = prompt.rsplit("Question: ", 1)
    text = text[text.rindex("Memorize and track") :]
    (value,) = set(re.findall(r"assigned the value (\d+)", question))
    holders = re.findall(rf"VAR (\w+) = {value}", text)
    for name in holders:
        holders += re.findall(rf"VAR (\w+) = VAR {name}\b", text)
    return holders


def _common(prompt: str) -> list[str]:
    listed = prompt[prompt.rindex("Below is a numbered list") :].rpartition("\nQuestion:")[0].partition("\n")[2]
    counts = Counter(re.findall(r"\d+\. (.*?)(?= \d+\. |$)", listed))
    return [word for word, _ in counts.most_common(10)]


def _frequent(prompt: str) -> list[str]:
    coded = prompt.partition("coded words. ")[2].rpartition("\nQuestion:")[0].split(" ")
    return [word for word, _ in Counter(coded).most_common(4) if word != "..."]


SOLVERS: dict[str, Callable[[str], list[str]]] = {
    **dict.fromkeys(GROUPS["niah_all"], _needle),
    "passkey": _passkey,
    "kv_retrieval": _kv,
    "phonebook": _phonebook,
    "graphwalks_bfs": _bfs,
    "graphwalks_parents": _parents,
    "numbered_requests": _numbered_request,
    "copy": _copy,
    "associative_recall": _recall,
    **dict.fromkeys((name for name in GROUPS["ruler"] if "niah" in name), _ruler_needle),
    "ruler_vt": _variables,
    "ruler_cwe": _common,
    "ruler_fwe": _frequent,
}
"""All tasks but the two of question answering, whose answers stand in the user's file alone."""
