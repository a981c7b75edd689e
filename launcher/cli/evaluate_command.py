"""The verb ``evaluate``; ``launcher/evaluate.py`` executes it over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, arg

from launcher.cli.cli_output import Update, note, print_json, print_line, progress, table
from launcher.cli.shared_options import RankFlags
from longctx.errors import ConfigError

if TYPE_CHECKING:
    from launcher.evaluation.evaluation_options import EvaluationOptions


def _unless_given(default: str) -> Any:
    """Show the effective default in the help, for an option that is unset by default."""
    return arg(help_behavior_hint=f"(default: {default})")


# Most options are unset by default, so that one that the user set can be told apart: an option that the requested tasks
# do not read is an error. ``_unless_given`` shows the effective default in the help.
@dataclass(frozen=True, kw_only=True)
class Flags:
    """Options for ``evaluate``."""

    checkpoint: Annotated[Path | None, arg(metavar="DIR")] = None
    """Checkpoint, run folder (its newest checkpoint), or Hugging Face folder."""
    tasks: Annotated[str, arg(metavar="A,B")] = ""
    """Tasks, task groups, ppl and longppl; --list prints them."""
    lengths: Annotated[str, arg(metavar="N,M")] = ""
    """Tokens in prompt and answer together, or in a text: 4096 or 4k; for masked and pairs the row length, default: the
    run's. A task is skipped at lengths that fit none of its prompts."""
    output: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder for rows, tables and pictures; in a run folder, it becomes part of the run's report.html."""
    list: bool = False
    """Print a line per task, and exit."""
    samples: Annotated[int | None, arg(aliases=["--limit"], help_behavior_hint="(default: 22)")] = None
    """Samples per task and length, or texts for ppl and longppl. For translation the first pairs, default: all; for
    masked and pairs the first rows, default: 64; for classes, pixels and probe images at equal distances in each
    folder, default: all."""
    haystack: Annotated[str | None, arg(metavar="FOLDER", aliases=["--data"])] = None
    """Text for hiding needles, and for ppl, longppl, masked and pairs: a folder with text or shards, or its URL
    (s3://BUCKET/FOLDER); default: the run's validation folder, otherwise stdlib, the source of Python's standard
    library. masked and pairs need shards; classes, pixels and probe need shards with images."""
    fit_data: Annotated[str | None, arg(metavar="FOLDER")] = None
    """For probe: shards with the images that the classifiers are fitted on, or their URL."""
    tokenizer: Annotated[Path | None, arg(metavar="TOKENIZER")] = None
    """For a folder without its own: SentencePiece model, tokenizer.json, or a folder with one."""
    seed: Annotated[int | None, _unless_given("42")] = None
    """Seed for the prompts."""
    depths: Annotated[str | None, arg(metavar="D,E"), _unless_given("0,0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1")] = None
    """Positions of answers, from 0 (the start) to 1; samples take them in turn, both ends first, then middles."""
    answer_tokens: int | None = None
    """Tokens reserved for each answer, instead of the task's own number; for translation, the maximum."""
    teacher_forced_from: Annotated[int | None, _unless_given("262144")] = None
    """From this length on, read the right answer instead of generating one, if that measures the same."""
    chat_template: Annotated[Literal["none", "auto"] | None, _unless_given("none")] = None
    """auto asks as a user, with the model's chat template if it has one; the reply starts as a task's answer does
    ("Answer:")."""
    beyond_positions: bool = False
    """Allow lengths beyond the model's positions."""
    squad: Annotated[Path | None, arg(metavar="F")] = None
    """SQuAD 2.0's dev-v2.0.json, for ruler_qa_1."""
    hotpotqa: Annotated[Path | None, arg(metavar="F")] = None
    """HotpotQA's hotpot_dev_distractor_v1.json, for ruler_qa_2."""
    english_words: Annotated[Path | None, arg(metavar="F")] = None
    """NVIDIA's english_words.json, for ruler_cwe beyond about 100,000 tokens."""
    pairs: Annotated[str | None, arg(metavar="FOLDER")] = None
    """For translation: shards with pairs, or their URL; default: the run's held-out pairs. Every pair is read, or the
    first --samples."""
    beams: Annotated[int | None, _unless_given("1")] = None
    """For translation: number of beams; 1 is greedy."""
    length_penalty: Annotated[float | None, _unless_given("1.0")] = None
    """For translation, with --beams: beams are compared by log-likelihood divided by length to this power."""
    longppl_truncation: Annotated[int | None, _unless_given("4096")] = None
    """Tokens of near context that LongPPL compares with."""
    longppl_window: Annotated[int | None, _unless_given("1024")] = None
    """Tokens that LongPPL reads with one near context."""
    ranks: OmitArgPrefixes[RankFlags] = field(default_factory=RankFlags)
    json: bool = False
    """Print JSON instead of tables."""


_TRANSLATION, _MASKED, _OTHERS = "translation", "masked", "others"
"""Kinds of tasks: translation; masked and pairs; all others but those of images, each of which is its own kind."""
_ROWS, _PROMPTS = ("masked", "pairs"), "tasks with prompts (niah, passkey, ruler, …)"
_OF_IMAGES = ("classes", "pixels", "probe")
_OF_TEXTS = ("masked", "pairs", "ppl", "longppl", _PROMPTS)
_READERS: dict[str, tuple[str, ...]] = {
    "lengths": _OF_TEXTS,
    "haystack": _OF_TEXTS + _OF_IMAGES,
    "fit_data": ("probe",),
    "tokenizer": ("ppl", "longppl", _PROMPTS),
    "seed": (_PROMPTS,),
    "depths": (_PROMPTS,),
    "answer_tokens": ("translation", _PROMPTS),
    "teacher_forced_from": (_PROMPTS,),
    "chat_template": (_PROMPTS,),
    "beyond_positions": _OF_TEXTS,
    "squad": ("ruler_qa_1",),
    "hotpotqa": ("ruler_qa_2",),
    "english_words": ("ruler_cwe",),
    "pairs": ("translation",),
    "beams": ("translation",),
    "length_penalty": ("translation",),
    "longppl_truncation": ("longppl",),
    "longppl_window": ("longppl",),
}
"""Tasks that read an option. Options missing here are read by all tasks."""


def run_evaluation(flags: Annotated[Flags, arg(name="")]) -> None:
    """Measure whether a model uses its context: scores, losses, tables, pictures.

    Each row is on disk before the next samples start, so the same command continues after an interruption. Over ranks:
    --ranks N starts N ranks here, --hostfile FILE those on its hosts.
    """
    from launcher.evaluation.evaluation_options import lines_of_tasks, split_names

    if flags.list:
        for line in lines_of_tasks():
            print_line(line)
        return
    task_names = split_names(flags.tasks)
    kind = _kind_of(task_names)
    _reject_unused(flags, kind)
    if kind == _TRANSLATION:
        _translate(flags)
    elif kind == _MASKED:
        _ask_encoder(flags, task_names)
    elif kind in _OF_IMAGES:
        _score_images(flags, kind)
    else:
        _evaluate(_options(flags), as_json=flags.json)


def _kind_of(task_names: Sequence[str]) -> str:
    """Return the tasks' kind. Raise ConfigError if they are of two kinds."""
    tasks = ",".join(task_names)
    # Each kind of task needs another kind of model, so one call serves one kind.
    for alone in (_TRANSLATION, *_OF_IMAGES):
        if alone in task_names:
            if len(task_names) > 1:
                raise ConfigError(f"--tasks {tasks}: {alone} runs alone. Evaluate the others in another call.")
            return alone
    others = [name for name in task_names if name not in _ROWS]
    if len(others) == len(task_names):
        return _OTHERS
    if others:
        raise ConfigError(
            f"--tasks {tasks}: masked and pairs need an encoder, {', '.join(others)} a decoder. Use two calls."
        )
    return _MASKED


def _reject_unused(flags: Flags, kind: str) -> None:
    """Raise ConfigError if an option is given that no task in this kind reads."""
    # An option without effect is an error: the user would otherwise believe that it took effect.
    unused: dict[str, list[str]] = {}
    for name, readers in _READERS.items():
        value = getattr(flags, name)
        is_read = kind in readers
        # These tasks mix freely in one call, so only options of tasks that run alone are certain to be unread.
        if kind == _OTHERS:
            is_read = readers not in (("translation",), ("probe",))
        if value not in (None, "") and value is not False and not is_read:
            unused.setdefault(_join_names(readers), []).append(f"--{name.replace('_', '-')}")
    if kind == _MASKED and flags.ranks.chunk_tokens != RankFlags().chunk_tokens:
        unused[f"all tasks but {_join_names(_ROWS)}"] = ["--chunk-tokens"]
    if unused:
        lines = "\n".join(f"  {_join_names(options)}: for {readers}" for readers, options in unused.items())
        raise ConfigError(f"--tasks {flags.tasks} does not read these options. Leave them out:\n{lines}")


def _join_names(names: Sequence[str]) -> str:
    *others, last = names
    if not others:
        return last
    return f"{', '.join(others)} and {last}"


def _given(**options: Any) -> dict[str, Any]:
    """Return only the options that are set, so that the others keep their defaults."""
    return {name: value for name, value in options.items() if value is not None}


def _translate(flags: Flags) -> None:
    """Translate pairs; rank 0 prints the scores."""
    from launcher.generation.translation import ROWS, Translation, translate_pairs
    from parallel.runtime.launched import environment_rank

    if flags.checkpoint is None or flags.output is None:
        raise ConfigError("evaluate --tasks translation needs --checkpoint DIR --output DIR.")
    # A penalty with --beams 1 is allowed: a loop over beam counts may pass the same penalty to all.
    if flags.length_penalty is not None and flags.beams is None:
        raise ConfigError(
            f"--length-penalty {flags.length_penalty:g} needs beam search. Add --beams 4, or leave it out."
        )
    translation = Translation(
        output=flags.output,
        pairs=flags.pairs,
        samples=flags.samples,
        answer_tokens=flags.answer_tokens,
        **_given(beams=flags.beams, length_penalty=flags.length_penalty),
    )
    scores = translate_pairs(translation, flags.ranks.values(), flags.checkpoint, token_progress)
    if environment_rank()[0] != 0:
        return
    if flags.json:
        print_json(scores)
        return
    rows = [[name, f"{scores[name]['score']:.2f}", scores[name]["signature"]] for name in ("bleu", "chrf")]
    print_line(table(["score", scores["model"], "signature"], rows) + "\n")
    if scores["left_out"]:
        count = scores["left_out"] + scores["pairs"]
        print_line(
            f"left out: {scores['left_out']:,} of {count:,} pairs, with sources longer than the model's positions"
        )
    print_line(str(flags.output / ROWS))


def _ask_encoder(flags: Flags, task_names: Sequence[str]) -> None:
    """Let an encoder predict masked tokens and pairs; rank 0 prints the scores."""
    from launcher.evaluation.evaluation_options import split_lengths
    from launcher.evaluation.masked_evaluation import SCORES, MaskedOptions, evaluate_masked
    from parallel.runtime.launched import environment_rank

    if flags.checkpoint is None or flags.output is None:
        raise ConfigError(f"evaluate --tasks {flags.tasks} needs --checkpoint DIR --output DIR.")
    # None is the run's own row length.
    lengths: Sequence[int | None] = (None,)
    if flags.lengths:
        lengths = split_lengths(flags.lengths)
    if len(lengths) != 1:
        raise ConfigError(f"--lengths {flags.lengths}: --tasks {flags.tasks} needs one row length.")
    scores = evaluate_masked(
        MaskedOptions(
            checkpoint=flags.checkpoint,
            output=flags.output,
            tasks=tuple(sorted(task_names)),
            text=flags.haystack,
            seq_len=lengths[0],
            beyond_positions=flags.beyond_positions,
            **_given(rows=flags.samples),
            **flags.ranks.values(),
        ),
        token_progress,
    )
    if environment_rank()[0] != 0:
        return
    if flags.json:
        print_json(scores)
        return
    named = {name: value for name, value in scores.items() if name != "model"}
    print_line(_named_values(scores["model"], named))
    print_line(str(flags.output / SCORES))


def _score_images(flags: Flags, task: str) -> None:
    """Score a model of images; rank 0 prints the scores."""
    from launcher.evaluation.image_evaluation import ImageEvaluationOptions, evaluate_images, scores_file
    from launcher.evaluation.image_probe import PROBE, ProbeOptions, probe_layers
    from parallel.runtime.launched import environment_rank

    if flags.checkpoint is None or flags.output is None:
        raise ConfigError(f"evaluate --tasks {task} needs --checkpoint DIR --output DIR.")
    options: dict[str, Any] = {"checkpoint": flags.checkpoint, "output": flags.output, "data": flags.haystack}
    options |= {"limit": flags.samples} | flags.ranks.values()
    if task == PROBE:
        scores = probe_layers(ProbeOptions(fit_data=flags.fit_data, **options), token_progress)
    else:
        scores = evaluate_images(ImageEvaluationOptions(task=task, **options), token_progress)
    if environment_rank()[0] != 0:
        return
    if flags.json:
        print_json(scores)
        return
    named = {name: value for name, value in scores.items() if name != "model" and not isinstance(value, list)}
    print_line(_named_values(scores["model"], named))
    # A row per confused pair of classes, or per layer.
    for rows in filter(None, (scores.get("confusions"), scores.get("layers"))):
        headers = [name.replace("_", " ") for name in rows[0]]
        print_line(table(headers, [[_cell(value) for value in row.values()] for row in rows]) + "\n")
    print_line(str(flags.output / scores_file(task)))


def _named_values(title: str, values: dict[str, Any]) -> str:
    """Return a table with a row per value."""
    return table(["", title], [[name.replace("_", " "), _cell(value)] for name, value in values.items()]) + "\n"


def _options(flags: Flags) -> EvaluationOptions:
    """Build validated options. Raise ConfigError for missing options or values out of range."""
    from launcher.evaluation.evaluation_options import (
        EvaluationOptions,
        LongPPL,
        split_depths,
        split_lengths,
        split_names,
    )
    from longctx.evaluation.evaluation_task import RulerFiles

    if flags.checkpoint is None or flags.output is None or not flags.tasks or not flags.lengths:
        raise ConfigError(
            "evaluate needs --checkpoint DIR --tasks A,B --lengths N,M --output DIR. `--list` lists the tasks."
        )
    depths = None
    if flags.depths is not None:
        depths = split_depths(flags.depths)
    return EvaluationOptions(
        checkpoint=flags.checkpoint,
        output=flags.output,
        tasks=split_names(flags.tasks),
        lengths=split_lengths(flags.lengths),
        haystack=flags.haystack,
        tokenizer=flags.tokenizer,
        answer_tokens=flags.answer_tokens,
        chat_template=flags.chat_template or "none",
        beyond_positions=flags.beyond_positions,
        ruler=RulerFiles(squad=flags.squad, hotpotqa=flags.hotpotqa, english_words=flags.english_words),
        longppl=LongPPL(**_given(truncation=flags.longppl_truncation, window=flags.longppl_window)),
        **_given(samples=flags.samples, seed=flags.seed, depths=depths, teacher_forced_from=flags.teacher_forced_from),
        **flags.ranks.values(),
    )


def _evaluate(options: EvaluationOptions, *, as_json: bool) -> None:
    """Evaluate; rank 0 prints the result."""
    import launcher.evaluation.evaluation_run as evaluation
    from parallel.runtime.launched import environment_rank

    # All ranks measure; rank 0 prints.
    is_rank_0 = environment_rank()[0] == 0
    if is_rank_0:
        _print_omissions(options)
    try:
        page = evaluation.evaluate_checkpoint(options, token_progress)
    except KeyboardInterrupt:
        if is_rank_0:
            note(f"{options.output} holds the results so far: the same command resumes from there.")
        raise
    if is_rank_0:
        _print(options, page, as_json=as_json)


def _print_omissions(options: EvaluationOptions) -> None:
    """Print group tasks that lack their file, and depths without a sample."""
    tasks, _, left_out = options.chosen()
    if left_out:
        note(f"left out, because their files are missing (--squad, --hotpotqa): {', '.join(left_out)}")
    # Samples take the depths in turn, so depths beyond the sample count stay untested.
    untested = options.depths[options.samples :]
    if untested and any(task.has_depth for task in tasks):
        depths = ", ".join(f"{depth:g}" for depth in sorted(untested))
        note(f"--samples {options.samples} leaves these depths without a sample: {depths}")


def token_progress(label: str, total: int | None = None) -> AbstractContextManager[Update]:
    """Show progress; with ``total`` tokens, also speed and remaining time."""
    from launcher.metrics.metrics_console import short_number

    if total is None:
        return progress(label)
    return progress(label, total=total, rate=lambda per_second: f"{short_number(per_second)} tokens/s")


def _print(options: EvaluationOptions, page: Path, *, as_json: bool) -> None:
    """Print the scores and losses, and the path to the page with all results."""
    from launcher.report.evaluation.evaluation_folder import load_evaluation
    from launcher.report.evaluation.evaluation_tables import area_rows, loss_rows, score_rows, summary_of

    evaluation = load_evaluation(options.output)
    if as_json:
        print_json(summary_of(evaluation))
        return
    for rows in (score_rows(evaluation), area_rows(evaluation), loss_rows(evaluation)):
        if rows:
            print_line(table(list(rows[0]), [[_cell(value) for value in row.values()] for row in rows]) + "\n")
    if evaluation.settings.get("chat"):
        print_line("Prompts were rendered by the model's chat template.")
    print_line(str(page))


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value}"
