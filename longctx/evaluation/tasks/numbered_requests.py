"""Recall of a numbered request, in the style of MRCR: a long conversation asks for the same thing several times.

At its end, the model must repeat its n-th answer. The templates and texts are ours; OpenAI's dataset with that name is
different, and scores are not comparable.
"""

from __future__ import annotations

from random import Random

from longctx.evaluation.independent_samples import Draft, PromptSpec
from longctx.evaluation.random_values import ADJECTIVES, NOUNS, nonsense

COPIES = 4
"""Occurrences of the same request in the conversation."""
MIN_TOKENS = COPIES
"""Turns in the shortest conversation."""

_KINDS = ("poem", "riddle", "letter", "song", "note", "prayer", "joke", "toast")
_ORDINALS = ("first", "second", "third", "fourth")
_PREDICATES = (
    "finds",
    "follows",
    "guards",
    "leaves",
    "loves",
    "meets",
    "misses",
    "paints",
    "passes",
    "remembers",
    "seeks",
)
_HOURS = ("at dawn", "at noon", "at dusk", "at night", "in spring", "in summer", "in autumn", "in winter")
_HEADER = "This is a conversation. Its last request asks for a text that was written before.\n\n"


def build_requests(request: PromptSpec) -> Draft:
    """Build the conversation with ``units`` turns before the last one."""
    random = request.random
    kind, subject = random.choice(_KINDS), random.choice(NOUNS)
    wanted = random.randrange(COPIES)
    # Without the code, a model could score by continuing an earlier text.
    code = nonsense(random, 4)
    copies = sorted((random.random(), _text(random)) for _ in range(COPIES))
    # A separate generator: more turns leave code, texts and the requested number unchanged.
    turns = _other_turns(Random(random.getrandbits(64)), request.units - COPIES, (kind, subject))
    turn_texts = [_turn(turn_kind, subject, text) for turn_kind, subject, text in turns]
    begin = 0
    for number, (where, text) in enumerate(copies):
        # Copies are in ascending order, so an earlier one never moves behind a later one.
        at = number + int(where * (len(turns) + 1))
        turn_texts.insert(at, _turn(kind, subject, text))
        if number == wanted:
            begin = len(_HEADER) + sum(map(len, turn_texts[:at])) + turn_texts[at].index(text)
    text = copies[wanted][1]
    question = (
        f"User: Write the {_ORDINALS[wanted]} {kind} about the {subject} again, word for word. "
        f"Write {code} before it.\nAssistant:"
    )
    return Draft(
        prompt=f"{_HEADER}{''.join(turn_texts)}{question}",
        answers=(f"{code} {text}", code),
        target=f" {code} {text}",
        spans=((begin, begin + len(text)),),
    )


def _other_turns(random: Random, count: int, excluded: tuple[str, str]) -> list[tuple[str, str, str]]:
    """Return kind, topic and text for turns with other requests."""
    turns: list[tuple[str, str, str]] = []
    while len(turns) < count:
        kind, subject = random.choice(_KINDS), random.choice(NOUNS)
        # A fifth text for the same request would make the numbers wrong.
        if (kind, subject) != excluded:
            turns.append((kind, subject, _text(random)))
    return turns


def _turn(kind: str, subject: str, text: str) -> str:
    return f"User: Write a {kind} about the {subject}.\nAssistant: {text}\n\n"


def _text(random: Random) -> str:
    """Return three sentences."""
    return " ".join(_sentence(random) for _ in range(3))


def _sentence(random: Random) -> str:
    who = f"{random.choice(ADJECTIVES)} {random.choice(NOUNS)}"
    whom = f"{random.choice(ADJECTIVES)} {random.choice(NOUNS)}"
    return f"The {who} {random.choice(_PREDICATES)} the {whom} {random.choice(_HOURS)}."
