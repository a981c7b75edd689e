"""RULER's thirteen tasks for the task table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from longctx.errors import DataError
from longctx.evaluation.evaluation_task import (
    EvaluationSample,
    EvaluationTask,
    Score,
    Setting,
    check_target,
    required_haystack,
    tokens_for_answer,
)
from longctx.evaluation.ruler import prompt_templates
from longctx.evaluation.ruler.document_questions import read_hotpotqa, read_squad
from longctx.evaluation.ruler.fit_length import Budget, RulerPrompt
from longctx.evaluation.ruler.needles import RulerNeedles
from longctx.evaluation.ruler.variable_tracking import texts as variable_texts
from longctx.evaluation.ruler.word_extraction import coded_words, common_words, indexed
from longctx.evaluation.scorers import clean_output, contains_all, contains_any

NOISE, KEYS, TEXT = "a repeated line", "other needles", "the haystack"


@dataclass(frozen=True, kw_only=True)
class RulerTask(EvaluationTask):
    """NVIDIA RULER task: samples come in sequence from one seed, so each depends on all previous ones."""

    texts: Callable[[Budget, Setting], Iterator[RulerPrompt]]
    rule: Score = contains_all
    join: Callable[[list[str]], str] = ", ".join
    """Format for a correct answer with several items."""

    def samples(self, setting: Setting, length: int, count: int, *, start: int = 0) -> Iterator[EvaluationSample]:
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
                raise DataError(f"task {self.name}'s file has {index} questions. Request at most that many samples.")
            # Earlier samples must be built too: they advance the random numbers.
            if index >= start:
                yield self._sample(budget, index, text)

    def score(self, output: str, sample: EvaluationSample) -> float:
        """Return NVIDIA's score for an output, after cleaning the text as in its scripts."""
        return super().score(clean_output(output), sample)

    def _sample(self, budget: Budget, index: int, text: RulerPrompt) -> EvaluationSample:
        answers = text.answers
        # If any of several answers counts, as in QA, the target has only one.
        if self.rule is contains_any:
            answers = answers[:1]
        target = self.join(answers)
        # Variable tracking ends with a space already.
        if not text.prompt.endswith(" "):
            target = f" {target}"
        sample = EvaluationSample(
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


def _needle_task(name: str, description: str, needles: RulerNeedles) -> RulerTask:
    """Return one of the eight needle tasks."""
    return RulerTask(
        name=f"ruler_niah_{name}",
        description=description,
        prompt_budget={"noise": NOISE, "needle": KEYS, "essay": TEXT}[needles.haystack_type],
        answer_tokens=prompt_templates.NIAH.answer_tokens,
        texts=lambda budget, setting: needles.texts(budget, setting.seed, setting.haystack),
        cue="The special magic",
        needs_haystack=needles.haystack_type == "essay",
    )


RULER_TASKS = (
    _needle_task("single_1", "RULER: one number in a repeated line", RulerNeedles(haystack_type="noise")),
    _needle_task("single_2", "RULER: one number in a text", RulerNeedles(haystack_type="essay")),
    _needle_task("single_3", "RULER: one UUID in a text", RulerNeedles(haystack_type="essay", value_type="uuids")),
    _needle_task(
        "multikey_1", "RULER: one number among four in a text", RulerNeedles(haystack_type="essay", num_keys=4)
    ),
    _needle_task("multikey_2", "RULER: one number among very many", RulerNeedles(haystack_type="needle")),
    _needle_task(
        "multikey_3",
        "RULER: one UUID among very many",
        RulerNeedles(haystack_type="needle", key_type="uuids", value_type="uuids"),
    ),
    _needle_task(
        "multivalue", "RULER: four numbers for one key in a text", RulerNeedles(haystack_type="essay", num_values=4)
    ),
    _needle_task(
        "multiquery", "RULER: numbers for four keys in a text", RulerNeedles(haystack_type="essay", num_queries=4)
    ),
    RulerTask(
        name="ruler_vt",
        description="RULER: all variables in an assignment chain",
        prompt_budget=NOISE,
        answer_tokens=prompt_templates.VARIABLE_TRACKING.answer_tokens,
        texts=lambda budget, setting: variable_texts(budget, setting.seed),
        join=" ".join,
    ),
    RulerTask(
        name="ruler_cwe",
        description="RULER: the ten most common words in a list",
        prompt_budget="words in a list",
        answer_tokens=prompt_templates.COMMON_WORDS.answer_tokens,
        texts=lambda budget, setting: common_words(budget, setting.seed, setting.ruler.english_words),
        join=lambda words: " ".join(indexed(words)),
    ),
    RulerTask(
        name="ruler_fwe",
        description="RULER: the three most frequent coded words",
        prompt_budget="coded words",
        answer_tokens=prompt_templates.CODED_WORDS.answer_tokens,
        texts=lambda budget, setting: coded_words(budget, setting.seed),
    ),
    RulerTask(
        name="ruler_qa_1",
        description="RULER: a question about one paragraph among many (SQuAD, your file)",
        prompt_budget="other documents",
        answer_tokens=prompt_templates.QUESTION_ANSWERING.answer_tokens,
        texts=lambda budget, setting: read_squad(setting.ruler.squad).texts(budget, setting.seed),
        rule=contains_any,
    ),
    RulerTask(
        name="ruler_qa_2",
        description="RULER: a question about two paragraphs among many (HotpotQA, your file)",
        prompt_budget="other documents",
        answer_tokens=prompt_templates.QUESTION_ANSWERING.answer_tokens,
        texts=lambda budget, setting: read_hotpotqa(setting.ruler.hotpotqa).texts(budget, setting.seed),
        rule=contains_any,
    ),
)
