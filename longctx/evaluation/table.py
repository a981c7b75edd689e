"""All tasks by name, and the groups that ``--tasks`` also accepts. A new task is a new entry here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import partial

from longctx.errors import ConfigError
from longctx.evaluation.fitted import FittedTask
from longctx.evaluation.ruler.tasks import RULER_TASKS
from longctx.evaluation.scorers import begins_with, contains_all, repeated_after_code, set_f1
from longctx.evaluation.task import Task
from longctx.evaluation.tasks import copying, graphwalks, requests
from longctx.evaluation.tasks.niah import Needles
from longctx.evaluation.tasks.pairs import PairList
from longctx.evaluation.tasks.passkey import build_passkey
from longctx.evaluation.values import name, nonsense, telephone, uuid4

SMALLEST_TEXT = 16
"""Words in the shortest haystack."""


def _needles(name: str, measures: str, answer_tokens: int, needles: Needles) -> FittedTask:
    """Return a needle task: a single answer is placed by depth; of several, each counts."""
    # A single answer can start the output; several may come in any order.
    is_single = needles.num_answers == 1
    rule = contains_all
    if is_single:
        rule = begins_with
    return FittedTask(
        name=name,
        measures=measures,
        prompt_budget="words of the haystack",
        answer_tokens=answer_tokens,
        build=needles.build,
        rule=rule,
        smallest=SMALLEST_TEXT,
        has_depth=is_single,
        needs_haystack=True,
    )


_JSON_PAIRS = PairList(
    key=uuid4,
    value=uuid4,
    opening="This JSON object maps keys to values.\n\n{",
    line='"{key}": "{value}"',
    separator=",\n ",
    question='}}\n\nThe value of the key "{key}" is',
    target=' "{value}"',
)
_PHONEBOOK = PairList(
    key=name,
    value=telephone,
    opening="This is a phonebook.\n\n",
    line="{key}: {value}",
    separator="\n",
    question="\n\nThe telephone number of {key} is",
)
_RECALL = PairList(
    key=partial(nonsense, syllables=3),
    value=partial(nonsense, syllables=3),
    opening="",
    line="{key} {value}",
    separator=", ",
    question="\n\n{key}",
)

_OWN: tuple[Task, ...] = (
    _needles("niah", "one number in a text, by depth", 16, Needles()),
    _needles("niah_word", "one pair of words in a text, by depth", 24, Needles(kind="word")),
    _needles("niah_uuid", "one UUID in a text, by depth", 48, Needles(kind="uuid")),
    _needles("niah_multikey", "one of four numbers in a text, by depth", 16, Needles(num_keys=4)),
    _needles("niah_multivalue", "all four numbers of one key in a text", 64, Needles(num_values=4)),
    _needles("niah_multiquery", "the numbers of three keys in a text, of four", 64, Needles(num_keys=4, num_queries=3)),
    FittedTask(
        name="passkey",
        measures="five digits among repeated sentences, by depth",
        prompt_budget="repeated sentences",
        answer_tokens=16,
        build=build_passkey,
        cue="The pass key is",
    ),
    FittedTask(
        name="kv_retrieval",
        measures="the value of one UUID among many pairs, by depth",
        prompt_budget="pairs of UUIDs",
        answer_tokens=48,
        build=_JSON_PAIRS.build,
        cue="The value of the key",
    ),
    FittedTask(
        name="phonebook",
        measures="the number of one name in a phonebook, by depth",
        prompt_budget="names and numbers",
        answer_tokens=24,
        build=_PHONEBOOK.build,
        cue="The telephone number of",
    ),
    FittedTask(
        name="graphwalks_bfs",
        measures="nodes three steps from a node: breadth-first search over random edges",
        prompt_budget="edges",
        answer_tokens=96,
        build=graphwalks.build_bfs,
        rule=set_f1,
        smallest=graphwalks.SMALLEST,
        has_depth=False,
    ),
    FittedTask(
        name="graphwalks_parents",
        measures="nodes with an edge to a node, over random edges",
        prompt_budget="edges",
        answer_tokens=96,
        build=graphwalks.build_parents,
        rule=set_f1,
        smallest=graphwalks.SMALLEST,
        has_depth=False,
    ),
    FittedTask(
        name="numbered_requests",
        measures="the n-th of four texts that were written for one request, word for word (MRCR's form, our texts)",
        prompt_budget="turns of a conversation",
        answer_tokens=256,
        build=requests.build_requests,
        rule=repeated_after_code,
        cue="Assistant:",
        smallest=requests.SMALLEST,
        has_depth=False,
    ),
    FittedTask(
        name="copy",
        measures="eight nonsense words after four of a sequence, by depth",
        prompt_budget="nonsense words",
        answer_tokens=96,
        build=copying.build_copy,
        cue="",
        smallest=copying.SMALLEST,
    ),
    FittedTask(
        name="associative_recall",
        measures="the word that followed another one in a list of pairs, by depth",
        prompt_budget="pairs of nonsense words",
        answer_tokens=16,
        build=_RECALL.build,
        cue="",
    ),
)

TASKS: dict[str, Task] = {task.name: task for task in _OWN + RULER_TASKS}

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


def find_tasks(names: Sequence[str]) -> list[Task]:
    """Return tasks for names and groups, each once; raise ConfigError, with the nearest name, for an unknown one."""
    found: dict[str, Task] = {}
    for asked in names:
        # Check before any prompt is built: a wrong name at the end of a list fails at once.
        if asked not in TASKS and asked not in GROUPS:
            nearest = get_close_matches(asked, TASKS | GROUPS, n=1, cutoff=0.5)
            advice = "".join(f"Did you mean {name}? " for name in nearest)
            raise ConfigError(
                f"task {asked!r} is unknown. {advice}Tasks: {', '.join(TASKS)}. Groups: {', '.join(GROUPS)}."
            )
        for task in GROUPS.get(asked, (asked,)):
            # A task that is named twice, or by two groups, runs once.
            found[task] = TASKS[task]
    if not found:
        raise ConfigError(f"No task is named. There are: {', '.join(TASKS | GROUPS)}.")
    return list(found.values())


def task_lines() -> Iterator[str]:
    """Yield one line per task: name, measure, prompt filler, answer tokens."""
    width = max(map(len, TASKS))
    for task in TASKS.values():
        budget = f"filled with {task.prompt_budget}, {task.answer_tokens} tokens for the answer"
        yield f"{task.name:{width}}  {task.measures}; {budget}"
