"""RULER's thirteen tasks for the task table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from longctx.errors import DataError
from longctx.evaluation.ruler import templates
from longctx.evaluation.ruler.needles import Needles
from longctx.evaluation.ruler.questions import read_hotpotqa, read_squad
from longctx.evaluation.ruler.search import Budget, Text
from longctx.evaluation.ruler.variables import texts as variable_texts
from longctx.evaluation.ruler.words import common_words, frequent_words, numbered
from longctx.evaluation.scorers import clean_output, contains_all, contains_any
from longctx.evaluation.task import Sample, Score, Setting, Task, check_target, required_haystack, tokens_for_answer

NOISE, KEYS, TEXT = "a repeated line", "other needles", "the haystack"


@dataclass(frozen=True, kw_only=True)
class RulerTask(Task):
    """NVIDIA RULER task: samples come in sequence from one seed, so each depends on all previous ones."""

    texts: Callable[[Budget, Setting], Iterator[Text]]
    rule: Score = contains_all
    join: Callable[[list[str]], str] = ", ".join
    """Format for a correct answer with several items."""

    def samples(self, setting: Setting, length: int, count: int, *, start: int = 0) -> Iterator[Sample]:
        """Yield samples ``start`` to ``count``; those before ``start`` are sampled and dropped."""
        if self.needs_haystack:
            required_haystack(self, setting)
        budget = Budget(
            task=self.name, tokenizer=setting.tokenizer, length=length, answer_tokens=tokens_for_answer(self, setting)
        )
        texts = self.texts(budget, setting)
        for index in range(count):
            text = next(texts, None)
            if text is None:
                raise DataError(f"task {self.name} has {index} questions in its file. Ask for so many samples at most.")
            # Earlier samples must be built too: they advance the random numbers.
            if index >= start:
                yield self._sample(budget, index, text)

    def score(self, output: str, sample: Sample) -> float:
        """Return NVIDIA's score for an output, after cleaning the text as in its scripts."""
        return super().score(clean_output(output), sample)

    def _sample(self, budget: Budget, index: int, text: Text) -> Sample:
        answers = text.answers
        # If any of several answers counts, as in QA, the target has only one.
        if self.rule is contains_any:
            answers = answers[:1]
        target = self.join(answers)
        # Variable tracking ends with a space already.
        if not text.prompt.endswith(" "):
            target = f" {target}"
        sample = Sample(
            task=self.name,
            length=budget.length,
            index=index,
            prompt=text.prompt,
            prompt_tokens=budget.tokens(text.prompt) + budget.reserved,
            answer_tokens=budget.answer_tokens,
            answers=tuple(text.answers),
            target=target,
        )
        check_target(sample, budget.tokenizer)
        return sample


def _needle_task(name: str, measures: str, needles: Needles) -> RulerTask:
    """Return one of the eight needle tasks."""
    return RulerTask(
        name=f"ruler_niah_{name}",
        measures=measures,
        prompt_budget={"noise": NOISE, "needle": KEYS, "essay": TEXT}[needles.haystack],
        answer_tokens=templates.NIAH.answer_tokens,
        texts=lambda budget, setting: needles.texts(budget, setting.seed, setting.haystack),
        cue="The special magic",
        needs_haystack=needles.haystack == "essay",
    )


RULER_TASKS = (
    _needle_task("single_1", "RULER: one number in a repeated line", Needles(haystack="noise")),
    _needle_task("single_2", "RULER: one number in a text", Needles(haystack="essay")),
    _needle_task("single_3", "RULER: one UUID in a text", Needles(haystack="essay", values="uuids")),
    _needle_task("multikey_1", "RULER: one of four numbers in a text", Needles(haystack="essay", num_keys=4)),
    _needle_task("multikey_2", "RULER: one of very many numbers", Needles(haystack="needle")),
    _needle_task(
        "multikey_3", "RULER: one of very many UUIDs", Needles(haystack="needle", keys="uuids", values="uuids")
    ),
    _needle_task("multivalue", "RULER: four numbers of one key in a text", Needles(haystack="essay", num_values=4)),
    _needle_task("multiquery", "RULER: numbers of four keys in a text", Needles(haystack="essay", num_queries=4)),
    RulerTask(
        name="ruler_vt",
        measures="RULER: all variables of a chain of assignments",
        prompt_budget=NOISE,
        answer_tokens=templates.VARIABLE_TRACKING.answer_tokens,
        texts=lambda budget, setting: variable_texts(budget, setting.seed),
        join=" ".join,
    ),
    RulerTask(
        name="ruler_cwe",
        measures="RULER: the ten most common words of a list",
        prompt_budget="words of a list",
        answer_tokens=templates.COMMON_WORDS.answer_tokens,
        texts=lambda budget, setting: common_words(budget, setting.seed, setting.ruler.english_words),
        join=lambda words: " ".join(numbered(words)),
    ),
    RulerTask(
        name="ruler_fwe",
        measures="RULER: the three most frequent coded words",
        prompt_budget="coded words",
        answer_tokens=templates.FREQUENT_WORDS.answer_tokens,
        texts=lambda budget, setting: frequent_words(budget, setting.seed),
    ),
    RulerTask(
        name="ruler_qa_1",
        measures="RULER: a question about one of many paragraphs (SQuAD, your file)",
        prompt_budget="other documents",
        answer_tokens=templates.QUESTION_ANSWERING.answer_tokens,
        texts=lambda budget, setting: read_squad(setting.ruler.squad).texts(budget, setting.seed),
        rule=contains_any,
    ),
    RulerTask(
        name="ruler_qa_2",
        measures="RULER: a question about two of many paragraphs (HotpotQA, your file)",
        prompt_budget="other documents",
        answer_tokens=templates.QUESTION_ANSWERING.answer_tokens,
        texts=lambda budget, setting: read_hotpotqa(setting.ruler.hotpotqa).texts(budget, setting.seed),
        rule=contains_any,
    ),
)
