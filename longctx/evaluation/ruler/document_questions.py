"""Question answering over documents, as in ``qa.py`` from NVIDIA's scripts, from a file that the user supplies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from longctx.errors import ConfigError, DataError
from longctx.evaluation.ruler.fit_length import Budget, ResampleError, RulerPrompt, sample_fitting, units_by_estimate
from longctx.evaluation.ruler.prompt_templates import DOCUMENT, QUESTION_ANSWERING
from longctx.untrusted.strict_json import read_json

_MOST_BYTES, _MOST_VALUES = 2**29, 50_000_000
"""Limits for reading; HotpotQA's file, the larger one, has 46 MB."""

STEP = 10


@dataclass(frozen=True, kw_only=True)
class Question:
    """Question, its answers, and the numbers of its documents."""

    text: str
    answers: list[str]
    documents: list[int]
    related: list[int]
    """Documents from the same article, used as distractors first."""


@dataclass(frozen=True, kw_only=True)
class QuestionFile:
    """All documents in a file, and the questions about them."""

    path: Path
    documents: list[str]
    questions: list[Question]

    def texts(self, budget: Budget, seed: int) -> Iterator[RulerPrompt]:
        """Yield one prompt per question; raise DataError if the file is too short for the length."""
        random = Random(seed)
        units = units_by_estimate(partial(self._draw, random, seed, 0), budget, step=STEP)
        # The script repeats documents then, including those with the answer.
        if units >= len(self.documents):
            raise DataError(
                f"length={budget.length}: all {len(self.documents)} documents in {self.path} fit into one prompt for "
                f"task {budget.task}, and documents are not repeated. Give the complete file, or try a shorter length."
            )
        for number in range(len(self.questions)):
            yield sample_fitting(partial(self._draw, random, seed, number), budget, units=units, step=STEP)

    def _draw(self, random: Random, seed: int, number: int, size: int) -> RulerPrompt:
        """Return question ``number`` among ``size`` documents."""
        question = self.questions[number]
        own, related = question.documents, question.related
        if size < len(self.documents):
            chosen = self._chosen(random, own, related, size)
        else:
            # The search may try more documents than the file has. No sample contains them.
            chosen = (list(range(len(self.documents))) * (size // len(self.documents) + 1))[:size]
        documents = [self.documents[at] for at in chosen]
        Random(seed).shuffle(documents)
        numbered_documents = [DOCUMENT.format(i=at, document=text) for at, text in enumerate(documents, start=1)]
        prompt = QUESTION_ANSWERING.text.format(context="\n\n".join(numbered_documents), query=question.text)
        return RulerPrompt(prompt=prompt, answers=question.answers)

    def _chosen(self, random: Random, own: list[int], related: list[int], size: int) -> list[int]:
        """Return the question's documents, then related ones, then any others."""
        missing = size - len(own)
        if missing <= len(related):
            # The script's sampling fails then, and it repeats the sample with the same number.
            if missing < 0:
                raise ResampleError
            return own + random.sample(related, missing)
        # A set: the script searches a list for each document, which is slow for many.
        known = set(own).union(related)
        others = [at for at in range(len(self.documents)) if at not in known]
        return own + related + random.sample(others, max(0, missing - len(related)))


def read_squad(path: Path | None) -> QuestionFile:
    """Read SQuAD 2.0's file; questions without an answer are left out."""
    return _read("ruler_qa_1", path, _parse_squad, "SQuAD 2.0's dev-v2.0.json")


def read_hotpotqa(path: Path | None) -> QuestionFile:
    """Read HotpotQA's file with distractors: each question has ten documents of its own."""
    return _read("ruler_qa_2", path, _parse_hotpotqa, "HotpotQA's hotpot_dev_distractor_v1.json")


def _read(
    task: str, path: Path | None, parse: Callable[[Any], tuple[list[str], list[Question]]], wanted: str
) -> QuestionFile:
    """Read the file with ``parse``; raise ConfigError if no path is given, DataError if parsing fails."""
    if path is None:
        raise ConfigError(
            f"task {task} needs a question file that no package includes. Give the file {wanted}, or omit the task."
        )
    try:
        documents, questions = parse(read_json(path, most_bytes=_MOST_BYTES, most_values=_MOST_VALUES))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(f"{path} cannot be read ({type(error).__name__}: {error}). Give {wanted}.") from error
    if not questions:
        raise DataError(f"{path} contains no question with an answer. Give {wanted}.")
    return QuestionFile(path=path, documents=documents, questions=questions)


def _parse_squad(content: Any) -> tuple[list[str], list[Question]]:
    """Parse SQuAD: each paragraph is a document; the other paragraphs in its article are related."""
    articles = [article["paragraphs"] for article in content["data"]]
    # Sorted and unique, as in the script: document numbers decide which distractors are sampled.
    documents = sorted({paragraph["context"] for article in articles for paragraph in article})
    numbers = {text: number for number, text in enumerate(documents)}
    questions: list[Question] = []
    for article in articles:
        of_article = [numbers[paragraph["context"]] for paragraph in article]
        for paragraph, own in zip(article, of_article, strict=True):
            related = [number for number in of_article if number != own]
            for item in paragraph["qas"]:
                if not item["is_impossible"]:
                    answers = [answer["text"] for answer in item["answers"]]
                    questions.append(Question(text=item["question"], answers=answers, documents=[own], related=related))
    return documents, questions


def _parse_hotpotqa(content: Any) -> tuple[list[str], list[Question]]:
    """Parse HotpotQA: each title with its sentences is a document."""
    documents = sorted({_titled(pair) for item in content for pair in item["context"]})
    numbers = {text: number for number, text in enumerate(documents)}
    questions = [
        Question(
            text=item["question"],
            answers=[item["answer"]],
            documents=[numbers[_titled(pair)] for pair in item["context"]],
            related=[],
        )
        for item in content
    ]
    return documents, questions


def _titled(pair: tuple[str, list[str]]) -> str:
    title, sentences = pair
    return f"{title}\n{''.join(sentences)}"
