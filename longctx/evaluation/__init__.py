"""Evaluation of context use: tasks that build prompts and score the text that a model generates after them.

No model runs here: prompts are built from a seed and fitted to a length by the model's own tokenizer, outputs become
score rows, and rows become means with intervals.
"""

from longctx.evaluation.evaluation_task import EvaluationSample, EvaluationTask, RulerFiles, Setting
from longctx.evaluation.haystack import Haystack
from longctx.evaluation.score_rows import ScoreRow, areas_by_task, by_depth, by_length, overall
from longctx.evaluation.task_table import GROUPS, TASKS, find_tasks, task_lines

# Names before 0.1, kept for one release.
Task, Sample, areas = EvaluationTask, EvaluationSample, areas_by_task

__all__ = [
    "GROUPS",
    "TASKS",
    "EvaluationSample",
    "EvaluationTask",
    "Haystack",
    "RulerFiles",
    "Sample",
    "ScoreRow",
    "Setting",
    "Task",
    "areas",
    "areas_by_task",
    "by_depth",
    "by_length",
    "find_tasks",
    "overall",
    "task_lines",
]
