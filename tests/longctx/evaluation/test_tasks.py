"""Every task: 20 samples whose answer is found in the prompt by hand, and the rules that all samples keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.errors import ConfigError, DataError
from longctx.evaluation import GROUPS, TASKS, EvaluationSample, Haystack, ScoreRow, Setting, find_tasks
from longctx.evaluation.evaluation_task import interleave_depths
from longctx.evaluation.independent_samples import IndependentTask, largest_fitting
from longctx.evaluation.random_values import distinct
from longctx.evaluation.score_rows import excerpt_of
from tests.longctx.evaluation.pieces import PieceTokenizer
from tests.longctx.evaluation.solvers import SOLVERS
from tests.longctx.evaluation.texts import haystack

LENGTH = 768
RULER_LENGTH = 2048
OWN = [name for name, task in TASKS.items() if isinstance(task, IndependentTask)]
QUESTIONS = ["ruler_qa_1", "ruler_qa_2"]
WRONG = "I do not know."


@pytest.fixture(scope="module")
def samples(setting: Setting):
    """A function that gives 20 samples of a task, made once."""

    @cache
    def of(name: str) -> list[EvaluationSample]:
        return list(TASKS[name].samples(setting, length_of(name), 20))

    return of


def length_of(name: str) -> int:
    """RULER's shortest prompts on a text have 500 words."""
    if name in OWN:
        return LENGTH
    return RULER_LENGTH


def test_every_task_has_a_solver():
    assert set(SOLVERS) | set(QUESTIONS) == set(TASKS)


@pytest.mark.parametrize("name", SOLVERS)
def test_the_answer_is_what_the_prompt_says(name: str, samples):
    for sample in samples(name):
        assert sorted(SOLVERS[name](sample.prompt)) == sorted(sample.answers), sample.prompt


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_document_of_the_prompt_holds_the_answer(name: str, samples):
    for sample in samples(name):
        assert all(answer in sample.prompt for answer in sample.answers)
        assert sample.prompt.endswith(" Answer:")


@pytest.mark.parametrize("name", TASKS)
def test_a_right_output_scores_1_and_a_wrong_one_0(name: str, samples):
    task = TASKS[name]
    for sample, other in zip(samples(name), samples(name)[1:], strict=False):
        assert task.score(sample.target, sample) == 1
        assert task.score(f"{sample.target}\nAnd so on.", sample) == pytest.approx(1, abs=0.1)
        assert task.score(WRONG, sample) == 0
        assert task.score("", sample) == 0
        # Two samples never share all of their answer: what is right for the one is wrong for the other.
        assert task.score(other.target, sample) < 1 or set(other.answers) == set(sample.answers)


@pytest.mark.parametrize("name", TASKS)
def test_prompt_and_answer_fit_and_little_is_left(name: str, samples, setting: Setting):
    for sample in samples(name):
        assert sample.prompt_tokens == len(setting.tokenizer.encode_prompt(sample.prompt))
        used = sample.prompt_tokens + sample.answer_tokens
        assert used <= sample.length == length_of(name)
        # A turn of a conversation is the largest unit. RULER's own search leaves more.
        if name in OWN:
            assert used > 0.92 * LENGTH, f"{used} of {LENGTH} tokens"
        assert len(setting.tokenizer.encode(sample.target)) <= sample.answer_tokens


@pytest.mark.parametrize("name", OWN)
def test_an_answer_stands_where_the_sample_says_and_nowhere_else(name: str, samples):
    for sample in samples(name):
        for start, stop in sample.spans:
            quoted = sample.prompt[start:stop]
            assert any(quoted in answer for answer in sample.answers)
            assert sample.prompt.count(quoted) == 1
        assert bool(sample.spans) == (not name.startswith("graphwalks"))


@pytest.mark.parametrize("name", [name for name in OWN if TASKS[name].has_depth])
def test_an_answer_stands_at_its_depth(name: str, samples, setting: Setting):
    for sample in samples(name):
        assert sample.depth == setting.depths[sample.index % len(setting.depths)]
        ((start, _),) = sample.spans
        # Introduction and question are a part of the prompt, and a sentence or a pair is not cut.
        assert start / len(sample.prompt) == pytest.approx(sample.depth, abs=0.16)


def test_depths_are_exact_in_a_long_text(setting: Setting):
    for sample in TASKS["niah"].samples(setting, 8192, 11, start=8):
        ((start, _),) = sample.spans
        assert start / len(sample.prompt) == pytest.approx(sample.depth, abs=0.02)


@pytest.mark.parametrize("name", TASKS)
def test_samples_depend_on_seed_length_and_index_alone(name: str, setting: Setting, samples):
    task = TASKS[name]
    assert list(task.samples(setting, length_of(name), 8, start=5)) == samples(name)[5:8]
    other_seed = next(task.samples(replace(setting, seed=1), length_of(name), 1))
    assert other_seed.prompt != samples(name)[0].prompt
    assert len({sample.prompt for sample in samples(name)}) == 20


@settings(max_examples=70, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(OWN),
    length=st.integers(40, 1500),
    index=st.integers(0, 10**6),
    begin=st.sampled_from([None, 1]),
    depth=st.floats(0, 1),
)
def test_no_budget_is_ever_exceeded(name: str, length: int, index: int, begin: int | None, depth: float):
    tokenizer = PieceTokenizer(begin=begin)
    setting = Setting(tokenizer=tokenizer, haystack=_text(), depths=[depth])
    task = TASKS[name]
    try:
        (sample,) = task.samples(setting, length, index + 1, start=index)
    except ConfigError as error:
        # Too short for any prompt: the length that the message names works.
        needed = int(str(error).partition("Try length=")[2].split(" ")[0])
        assert length < needed < 1000
        (sample,) = task.samples(setting, needed, index + 1, start=index)
        length = needed
    assert len(tokenizer.encode_prompt(sample.prompt)) == sample.prompt_tokens
    assert sample.prompt_tokens + sample.answer_tokens <= length
    assert sorted(SOLVERS[name](sample.prompt)) == sorted(sample.answers)
    assert all(sample.prompt[start:stop] in " ".join(sample.answers) for start, stop in sample.spans)


@cache
def _text() -> Haystack:
    return haystack(4000)


def test_an_unknown_task_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"task 'pass_key' is unknown. Did you mean passkey"):
        find_tasks(["niah", "pass_key"])
    with pytest.raises(ConfigError, match="No task was given"):
        find_tasks([])


def test_groups_are_tasks_and_each_is_found_once():
    found = find_tasks(["ruler", "ruler_vt", "graphwalks", "niah"])
    assert [task.name for task in found] == [*GROUPS["ruler"], *GROUPS["graphwalks"], "niah"]
    assert len(GROUPS["ruler"]) == 13
    for group in GROUPS.values():
        assert all(name in TASKS for name in group)


def test_a_task_on_a_text_asks_for_one(setting: Setting):
    for name in ("niah", "ruler_niah_single_2"):
        with pytest.raises(ConfigError, match=f"task {name} needs a haystack to hide its needles in"):
            next(TASKS[name].samples(replace(setting, haystack=None), LENGTH, 1))


@pytest.mark.parametrize("name", ["niah", "ruler_niah_single_2"])
def test_a_haystack_that_is_too_short_says_which_length_works(name: str, setting: Setting):
    short = replace(setting, haystack=haystack(2000))
    with pytest.raises(DataError, match=r"haystack test has 2,00. words") as refused:
        list(TASKS[name].samples(short, 1 << 14, 3))
    works = int(str(refused.value).partition("try length=")[2].split(" ")[0])
    for sample in TASKS[name].samples(short, works, 3):
        assert sample.prompt_tokens + sample.answer_tokens > 0.8 * works


def test_an_answer_longer_than_what_is_left_is_refused(setting: Setting):
    with pytest.raises(DataError, match=r"reserves 3 tokens for its answer, which needs 5 .* Try answer_tokens=6"):
        next(TASKS["niah"].samples(replace(setting, answer_tokens=3), LENGTH, 1))
    sample = next(TASKS["niah"].samples(replace(setting, answer_tokens=6), LENGTH, 1))
    assert sample.answer_tokens == 6


def test_more_values_than_there_are_is_an_error():
    """A draw that goes on for ever looks like a long one."""
    assert sorted(distinct(Random(0), lambda random: str(random.randrange(9)), 9)) == list("012345678")
    with pytest.raises(DataError, match="10 distinct values are needed, and only 9"):
        distinct(Random(0), lambda random: str(random.randrange(9)), 10)


@pytest.mark.parametrize(("field", "value"), [("depths", []), ("depths", [1.2]), ("answer_tokens", 0)])
def test_a_setting_that_cannot_be_is_refused(field: str, value: object, setting: Setting):
    with pytest.raises(ConfigError, match=field):
        replace(setting, **{field: value})


def test_ruler_refuses_a_length_below_its_shortest_prompt(setting: Setting):
    """NVIDIA's scripts never end there."""
    for name in ("ruler_niah_single_1", "ruler_niah_multiquery", "ruler_vt", "ruler_cwe", "ruler_fwe", "ruler_qa_1"):
        with pytest.raises(ConfigError, match=f"length=150.*task {name}"):
            next(TASKS[name].samples(setting, 150, 1))


def too_many(name: str, setting: Setting) -> Iterator[EvaluationSample]:
    return TASKS[name].samples(setting, RULER_LENGTH, 10**6)


def test_question_answering_asks_for_its_file_and_ends_with_it(setting: Setting):
    with pytest.raises(ConfigError, match=r"ruler_qa_1 .*dev-v2.0.json"):
        next(TASKS["ruler_qa_1"].samples(Setting(tokenizer=setting.tokenizer), LENGTH, 1))
    with pytest.raises(DataError, match="task ruler_qa_2's file has 40 questions"):
        list(too_many("ruler_qa_2", setting))
    with pytest.raises(DataError, match=r"all 200 documents .* fit into one prompt"):
        next(TASKS["ruler_qa_1"].samples(setting, 1 << 15, 1))


# The search for the amount of filler.


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    steps=st.lists(st.integers(0, 9), min_size=2, max_size=400),
    smallest=st.integers(0, 3),
    extra=st.integers(0, 2500),
    bounded=st.booleans(),
)
def test_one_unit_more_would_not_fit(steps: list[int], smallest: int, extra: int, bounded: bool):
    sums = list(accumulate(steps, initial=5))

    def tokens_of(units: int) -> int:
        within = min(units, len(steps))
        return sums[within] + 3 * (units - within)

    most = None
    if bounded:
        most = smallest + 150
    budget = tokens_of(smallest) + extra
    found = largest_fitting(tokens_of, minimum=smallest, most=most, budget=budget)
    assert tokens_of(found) <= budget
    assert found == most or tokens_of(found + 1) > budget


def test_a_million_units_take_few_probes():
    probes: list[int] = []

    def tokens_of(units: int) -> int:
        probes.append(units)
        return 40 + units * 13 // 10 + (units // 97) % 5

    found = largest_fitting(tokens_of, minimum=16, most=None, budget=1_000_000)
    assert tokens_of(found) <= 1_000_000
    assert len(probes) <= 16
    assert sum(probes) < 16 * found


@settings(max_examples=50, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), budget=st.integers(60, 5000))
def test_uneven_tokens_still_fit(seed: int, budget: int):
    """More filler may take fewer tokens: what is found fits all the same."""

    def tokens_of(units: int) -> int:
        return 20 + 2 * units + (units * 2654435761 + seed) % 23

    assert tokens_of(largest_fitting(tokens_of, minimum=1, most=None, budget=budget)) <= budget


@given(st.sets(st.integers(0, 100), min_size=1, max_size=30), st.integers(2, 30))
def test_few_samples_are_spread_over_the_depths(hundredths: set[int], samples: int):
    """Whatever their number, no gap between two depths that are asked is twice as wide as another one, nearly."""
    depths = [number / 100 for number in hundredths]
    order = interleave_depths(depths)
    assert sorted(order) == sorted(depths)
    assert set(order[:2]) == {min(depths), max(depths)}
    asked = sorted(sorted(depths).index(depth) for depth in order[:samples])
    gaps = [after - before for before, after in pairwise(asked)]
    assert not gaps or max(gaps) <= 2 * min(gaps) + 2


def test_an_excerpt_shows_answers_and_the_end():
    prompt = "a" * 500 + " the code is 4711. " + "b" * 500 + " What is the code?"
    at = prompt.index("4711")
    values = {"task": "niah", "length": 9, "index": 0, "prompt_tokens": 9, "answer_tokens": 9}
    sample = EvaluationSample(**values, prompt=prompt, answers=("4711",), target=" 4711", spans=((at, at + 4),))
    excerpt = excerpt_of(sample)
    assert len(excerpt) < 500
    assert " … " in excerpt
    assert "the code is 4711." in excerpt
    assert excerpt.endswith("What is the code?")
    short = replace(sample, prompt="The code is 4711. What is it?", spans=((12, 16),))
    assert excerpt_of(short) == short.prompt
    assert ScoreRow.of(find_tasks(["niah"])[0], short, " 4711").excerpt == ""
    assert ScoreRow.of(find_tasks(["niah"])[0], short, " no").excerpt == short.prompt
