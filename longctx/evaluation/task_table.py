"""All tasks by name, and the groups that ``--tasks`` also accepts. A new task is a new entry here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import partial

from longctx.errors import ConfigError
from longctx.evaluation.evaluation_task import EvaluationTask
from longctx.evaluation.independent_samples import IndependentTask
from longctx.evaluation.random_values import name, nonsense, telephone, uuid4
from longctx.evaluation.ruler.tasks import RULER_TASKS
from longctx.evaluation.scorers import contains_all, repeated_after_code, set_f1, starts_with
from longctx.evaluation.tasks import copying, graphwalks, numbered_requests
from longctx.evaluation.tasks.niah import NeedleTask
from longctx.evaluation.tasks.pair_lists import PairList
from longctx.evaluation.tasks.passkey import build_passkey

MIN_TEXT = 16
"""Words in the shortest haystack."""


def _needles(name: str, description: str, answer_tokens: int, needles: NeedleTask) -> IndependentTask:
    """Return a needle task: a single answer is placed by depth; of several, each counts."""
    # A single answer can start the output; several may come in any order.
    is_single = needles.num_answers == 1
    rule = contains_all
    if is_single:
        rule = starts_with
    return IndependentTask(
        name=name,
        description=description,
        prompt_budget="haystack words",
        answer_tokens=answer_tokens,
        build=needles.build,
        rule=rule,
        minimum=MIN_TEXT,
        has_depth=is_single,
        needs_haystack=True,
    )


_JSON_PAIRS = PairList(
    key=uuid4,
    value=uuid4,
    prefix="This JSON object maps keys to values.\n\n{",
    line='"{key}": "{value}"',
    separator=",\n ",
    question='}}\n\nThe value of the key "{key}" is',
    target=' "{value}"',
)
_PHONEBOOK = PairList(
    key=name,
    value=telephone,
    prefix="This is a phonebook.\n\n",
    line="{key}: {value}",
    separator="\n",
    question="\n\nThe telephone number of {key} is",
)
_RECALL = PairList(
    key=partial(nonsense, syllables=3),
    value=partial(nonsense, syllables=3),
    prefix="",
    line="{key} {value}",
    separator=", ",
    question="\n\n{key}",
)

_OWN: tuple[EvaluationTask, ...] = (
    _needles("niah", "one number in a text, by depth", 16, NeedleTask()),
    _needles("niah_word", "one word pair in a text, by depth", 24, NeedleTask(kind="word")),
    _needles("niah_uuid", "one UUID in a text, by depth", 48, NeedleTask(kind="uuid")),
    _needles("niah_multikey", "one number among four in a text, by depth", 16, NeedleTask(num_keys=4)),
    _needles("niah_multivalue", "all four numbers for one key in a text", 64, NeedleTask(num_values=4)),
    _needles(
        "niah_multiquery", "the numbers for three keys among four in a text", 64, NeedleTask(num_keys=4, num_queries=3)
    ),
    IndependentTask(
        name="passkey",
        description="five digits among repeated sentences, by depth",
        prompt_budget="repeated sentences",
        answer_tokens=16,
        build=build_passkey,
        cue="The pass key is",
    ),
    IndependentTask(
        name="kv_retrieval",
        description="one UUID's value among many pairs, by depth",
        prompt_budget="UUID pairs",
        answer_tokens=48,
        build=_JSON_PAIRS.build,
        cue="The value of the key",
    ),
    IndependentTask(
        name="phonebook",
        description="one name's number in a phonebook, by depth",
        prompt_budget="names and numbers",
        answer_tokens=24,
        build=_PHONEBOOK.build,
        cue="The telephone number of",
    ),
    IndependentTask(
        name="graphwalks_bfs",
        description="nodes three steps from a node: breadth-first search over random edges",
        prompt_budget="edges",
        answer_tokens=96,
        build=graphwalks.build_bfs,
        rule=set_f1,
        minimum=graphwalks.MIN_TOKENS,
        has_depth=False,
    ),
    IndependentTask(
        name="graphwalks_parents",
        description="nodes with an edge to a node, over random edges",
        prompt_budget="edges",
        answer_tokens=96,
        build=graphwalks.build_predecessors,
        rule=set_f1,
        minimum=graphwalks.MIN_TOKENS,
        has_depth=False,
    ),
    IndependentTask(
        name="numbered_requests",
        description="the n-th text among four written for one request, word for word (MRCR's form, our texts)",
        prompt_budget="conversation turns",
        answer_tokens=256,
        build=numbered_requests.build_requests,
        rule=repeated_after_code,
        cue="Assistant:",
        minimum=numbered_requests.MIN_TOKENS,
        has_depth=False,
    ),
    IndependentTask(
        name="copy",
        description="eight nonsense words that follow four in a sequence, by depth",
        prompt_budget="nonsense words",
        answer_tokens=96,
        build=copying.build_copy,
        cue="",
        minimum=copying.MIN_TOKENS,
    ),
    IndependentTask(
        name="associative_recall",
        description="the word that followed another one in a list of pairs, by depth",
        prompt_budget="nonsense word pairs",
        answer_tokens=16,
        build=_RECALL.build,
        cue="",
    ),
)

TASKS: dict[str, EvaluationTask] = {task.name: task for task in _OWN + RULER_TASKS}

GROUPS: dict[str, tuple[str, ...]] = {
    "niah_all": tuple(task.name for task in _OWN if task.name.startswith("niah")),
    "graphwalks": ("graphwalks_bfs", "graphwalks_parents"),
    "probes": ("copy", "associative_recall"),
    "ruler": tuple(task.name for task in RULER_TASKS),
    "ruler_synthetic": (
        "ruler_niah_single_1",
        "ruler_niah_multikey_2",
        "ruler_niah_multikey_3",
        "ruler_vt",
        "ruler_cwe",
        "ruler_fwe",
    ),
}
"""Names for several tasks at once. ``ruler_synthetic`` needs neither a haystack nor files."""


def find_tasks(names: Sequence[str]) -> list[EvaluationTask]:
    """Return tasks for names and groups, each once; raise ConfigError, with the nearest name, for an unknown one."""
    found: dict[str, EvaluationTask] = {}
    for requested in names:
        # Check before any prompt is built: a wrong name at the end of a list fails at once.
        if requested not in TASKS and requested not in GROUPS:
            nearest = get_close_matches(requested, TASKS | GROUPS, n=1, cutoff=0.5)
            hint = "".join(f"Did you mean {name}? " for name in nearest)
            raise ConfigError(
                f"task {requested!r} is unknown. {hint}Tasks: {', '.join(TASKS)}. Groups: {', '.join(GROUPS)}."
            )
        for task in GROUPS.get(requested, (requested,)):
            # A task that is named twice, or by two groups, runs once.
            found[task] = TASKS[task]
    if not found:
        raise ConfigError(f"No task was given. Tasks and groups: {', '.join(TASKS | GROUPS)}.")
    return list(found.values())


def task_lines() -> Iterator[str]:
    """Yield one line per task: name, measure, prompt filler, answer tokens."""
    width = max(map(len, TASKS))
    for task in TASKS.values():
        budget = f"filled with {task.prompt_budget}, {task.answer_tokens} tokens for the answer"
        yield f"{task.name:{width}}  {task.description}; {budget}"
