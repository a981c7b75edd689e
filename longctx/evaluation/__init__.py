"""Evaluation of context use: tasks that build prompts and score the text that a model generates after them.

No model runs here: prompts are built from a seed and fitted to a length by the model's own tokenizer, outputs become
score rows, and rows become means with intervals.
"""

from longctx.evaluation.haystack import Haystack
from longctx.evaluation.results import ScoreRow, areas, by_depth, by_length, overall
from longctx.evaluation.table import GROUPS, TASKS, find_tasks, task_lines
from longctx.evaluation.task import RulerFiles, Sample, Setting, Task

__all__ = [
    "GROUPS",
    "TASKS",
    "Haystack",
    "RulerFiles",
    "Sample",
    "ScoreRow",
    "Setting",
    "Task",
    "areas",
    "by_depth",
    "by_length",
    "find_tasks",
    "overall",
    "task_lines",
]
