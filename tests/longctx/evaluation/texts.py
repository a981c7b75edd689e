"""Texts and question files for the tests: deterministic, and larger than any prompt there."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from longctx.evaluation import Haystack

_SOUNDS = ["an", "be", "co", "du", "el", "fi", "go", "ha", "in", "ka", "lo", "mu", "ne", "or", "pe", "qui", "so", "ti"]


def haystack(words: int = 20_000, seed: int = 7) -> Haystack:
    """Sentences of 3 to 12 words of no language."""
    random = Random(seed)
    texts: list[str] = []
    made = 0
    while made < words:
        count = random.randint(3, 12)
        sentence = " ".join(_word(random) for _ in range(count))
        texts.append(f"{sentence.capitalize()}{random.choice('..!?')}")
        made += count
    return Haystack([" ".join(texts)], source="test")


def write_squad(path: Path, articles: int = 40) -> Path:
    """A file in SQuAD 2.0's form: five paragraphs an article, each with an answered question and one without answer."""
    random = Random(1)
    data = []
    for number in range(articles):
        paragraphs = []
        for part in range(5):
            words = [f"Place{number}x{part}", *(_word(random) for _ in range(random.randint(20, 60)))]
            answers = [{"text": words[0]}, {"text": " ".join(words[:2])}]
            asked = {"question": f"What comes before {words[1]}?", "answers": answers, "is_impossible": False}
            unanswered = {"question": "Why?", "answers": [], "is_impossible": True}
            paragraphs.append({"context": " ".join(words), "qas": [asked, unanswered]})
        data.append({"paragraphs": paragraphs})
    path.write_text(json.dumps({"data": data}))
    return path


def write_hotpotqa(path: Path, questions: int = 40) -> Path:
    """A file in HotpotQA's form: ten titled documents a question."""
    random = Random(2)
    content = []
    for number in range(questions):
        context = []
        for part in range(10):
            sentences = [" ".join(_word(random) for _ in range(random.randint(5, 9))) + "." for _ in range(3)]
            context.append([f"Title {number} {part}", sentences])
        content.append({"question": f"Which one is {number}?", "answer": f"Title {number} 3", "context": context})
    path.write_text(json.dumps(content))
    return path


def _word(random: Random) -> str:
    return "".join(random.choice(_SOUNDS) for _ in range(random.randint(1, 3)))
