"""Documents to learn recall from: what they hold, and that they never change."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace

import pytest

from longctx.errors import ConfigError
from longctx.evaluation.recall_documents import Practice

USUAL = Practice(words=(20, 90), pairs=(2, 6), mentions=(1, 3), questions=(1, 4))
NEEDLE = re.compile(r"The secret code of (\S+) is (\S+)\.")
QUESTION = re.compile(r"\n\nQuestion: What is the secret code of (\S+)\?\nAnswer: The secret code of (\S+) is (\S+)\.")


@pytest.mark.parametrize("kind", ["number", "word", "uuid"])
def test_every_question_has_its_answer_in_the_text(kind):
    practice = replace(USUAL, kind=kind)
    for index in range(50):
        document = practice.document(index)
        context, *_ = document.split("\n\nQuestion:")
        hidden: dict[str, set[str]] = {}
        mentions: dict[str, int] = {}
        for key, code in NEEDLE.findall(context):
            hidden.setdefault(key, set()).add(code)
            mentions[key] = mentions.get(key, 0) + 1
        assert 2 <= len(hidden) <= 6
        assert all(len(codes) == 1 for codes in hidden.values())
        assert all(1 <= count <= 3 for count in mentions.values())
        asked = QUESTION.findall(document)
        assert 1 <= len(asked) <= 4
        assert len({key for key, _, _ in asked}) == len(asked)
        for key, again, code in asked:
            assert key == again
            assert hidden[key] == {code}


def test_codes_stand_at_both_ends_as_often_as_an_evaluation_asks_there():
    single = Practice(words=(300, 300), pairs=(1, 1), mentions=(1, 1), questions=(1, 1))
    places = []
    for index in range(400):
        context, *_ = single.document(index).split("\n\nQuestion:")
        # The introduction is a paragraph of its own.
        needle = NEEDLE.search(context := context.split("\n\n")[1])
        assert needle is not None
        places.append((needle.start() == 0, needle.end() == len(context)))
    first, last = (sum(ends) / len(places) for ends in zip(*places, strict=True))
    # One of eleven depths of the task's grid is an end's.
    assert 0.09 < first < 0.2
    assert 0.09 < last < 0.2


def test_plain_documents_hold_no_code_and_no_number():
    document = Practice(words=(500, 500), pairs=(0, 0), mentions=(1, 1), questions=(0, 0)).document(1)
    assert 500 <= len(document.split()) < 515
    assert not re.search(r"secret|code|\d", document)


def test_documents_depend_on_seed_and_index_alone():
    again = replace(USUAL)
    assert [USUAL.document(n) for n in (5, 0)] == [again.document(n) for n in (5, 0)]
    other = replace(USUAL, seed=1)
    assert len({USUAL.document(0), USUAL.document(1), other.document(0)}) == 3
    together = "\0".join(USUAL.document(n) for n in range(20))
    # A later release that writes other documents trains another model: that is worth a line in the changelog.
    assert hashlib.sha256(together.encode()).hexdigest()[:16] == GOLDEN


GOLDEN = "1ab5361c571da398"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"words": (9, 3)}, "words=9 3"),
        ({"words": (-1, 3)}, "words=-1 3"),
        ({"mentions": (0, 1)}, "mentions=0 1: expected a minimum"),
        ({"kind": "name"}, "kind='name' is unknown"),
        ({"words": (0, 5), "pairs": (0, 2)}, "may both be 0"),
        ({"pairs": (1, 2000)}, "at most 1000 pairs"),
    ],
)
def test_refused(changed, message):
    options = {"words": (1, 2), "pairs": (1, 2), "mentions": (1, 2), "questions": (1, 2), **changed}
    with pytest.raises(ConfigError, match=message):
        Practice(**options)
