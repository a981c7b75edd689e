"""The verb ``evaluate``; ``launcher/evaluate.py`` is the same over ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import OmitArgPrefixes, arg

from launcher.cli.console import Update, note, progress, say, say_json, table
from launcher.cli.options import RankFlags
from longctx.errors import ConfigError

if TYPE_CHECKING:
    from launcher.evaluation.options import Options


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The options of ``evaluate``."""

    checkpoint: Annotated[Path | None, arg(metavar="DIR")] = None
    """Checkpoint, run folder (its newest checkpoint), or Hugging Face folder."""
    tasks: Annotated[str, arg(metavar="A,B")] = ""
    """Tasks, groups of tasks, ppl and longppl; --list names them."""
    lengths: Annotated[str, arg(metavar="N,M")] = ""
    """Tokens of prompt and answer together."""
    output: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder for rows, tables and pictures; in a run folder it becomes a part of the run's report.html."""
    list: bool = False
    """Print a line for each task, and end."""
    samples: int = 22
    """Samples of each task and length; texts of ppl and longppl."""
    haystack: Annotated[str | None, arg(metavar="FOLDER")] = None
    """Text that needles are hidden in: a folder of text or shards, or its URL (s3://BUCKET/FOLDER); by default the
    run's validation folder."""
    tokenizer: Annotated[Path | None, arg(metavar="TOKENIZER")] = None
    """For a folder that has none of its own: SentencePiece model, tokenizer.json, or a folder with one."""
    seed: int = 42
    """Seed of the prompts."""
    depths: Annotated[str, arg(metavar="D,E")] = "0,0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1"
    """Where answers stand, from 0 (the beginning) to 1; samples take them in turn."""
    answer_tokens: int | None = None
    """Tokens that are left for each answer, instead of the task's own number."""
    teacher_forced_from: int = 262_144
    """From this length on the right answer is read, not generated, where that measures the same."""
    chat: bool = False
    """Ask as a user, by the model's chat template; the reply begins as a task's answer does ("Answer:")."""
    beyond_positions: bool = False
    """Allow lengths beyond the model's positions."""
    squad: Annotated[Path | None, arg(metavar="F")] = None
    """SQuAD 2.0's dev-v2.0.json, for ruler_qa_1."""
    hotpotqa: Annotated[Path | None, arg(metavar="F")] = None
    """HotpotQA's hotpot_dev_distractor_v1.json, for ruler_qa_2."""
    english_words: Annotated[Path | None, arg(metavar="F")] = None
    """NVIDIA's english_words.json, for ruler_cwe beyond about 100,000 tokens."""
    pairs: Annotated[str | None, arg(metavar="FOLDER")] = None
    """For translation: shards of pairs, or their URL; by default what the run held out. Every pair is read, or the
    first --samples of them."""
    beams: int = 1
    """For translation: search with so many beams; 1 is greedy."""
    length_penalty: float = 1.0
    """For translation: beams are compared by log-likelihood over length to this power."""
    longppl_truncation: int = 4096
    """Tokens of near context that LongPPL compares with."""
    longppl_window: int = 1024
    """Tokens that it reads with one near context."""
    ranks: OmitArgPrefixes[RankFlags] = field(default_factory=RankFlags)
    json: bool = False
    """Print JSON instead of tables."""


def evaluate(flags: Annotated[Flags, arg(name="")]) -> None:
    """Measure whether a model uses its context: scores, losses, tables, pictures.

    Every row is on the disk before the next samples begin: the same command goes on where it stopped.
    Over ranks: deepspeed --hostfile hostfile launcher/evaluate.py with the same options.
    """
    from launcher.evaluation.options import lines_of_tasks

    if flags.list:
        for line in lines_of_tasks():
            say(line)
        return
    if flags.tasks.strip() == "translation":
        _translate(flags)
        return
    asked = {name.strip() for name in flags.tasks.split(",")}
    if asked & {"masked", "pairs"}:
        _ask_encoder(flags, asked)
        return
    _evaluate(_options(flags), as_json=flags.json)


def _translate(flags: Flags) -> None:
    """Translate pairs; rank 0 prints the scores."""
    from launcher.generation.translation import ROWS, Translation, translate
    from parallel.runtime.launched import environment_rank

    if flags.checkpoint is None or flags.output is None:
        raise ConfigError("evaluate --tasks translation needs --checkpoint DIR --output DIR.")
    asked = Translation(
        output=flags.output,
        pairs=flags.pairs,
        # The number of the other tasks is none of this one's.
        samples=flags.samples if flags.samples != Flags().samples else 0,
        beams=flags.beams,
        length_penalty=flags.length_penalty,
        answer_tokens=flags.answer_tokens,
    )
    scores = translate(asked, flags.ranks.values(), flags.checkpoint, token_progress)
    if environment_rank()[0] != 0:
        return
    if flags.json:
        say_json(scores)
        return
    rows = [[name, f"{scores[name]['score']:.2f}", scores[name]["signature"]] for name in ("bleu", "chrf")]
    say(table(["score", scores["model"], "signature"], rows) + "\n")
    say(str(flags.output / ROWS))


def _ask_encoder(flags: Flags, asked: set[str]) -> None:
    """Have an encoder predict masked tokens and pairs; rank 0 prints the scores."""
    from launcher.evaluation.masked import SCORES, Options, measure
    from launcher.evaluation.options import split_lengths
    from parallel.runtime.launched import environment_rank

    if others := asked - {"masked", "pairs"}:
        raise ConfigError(
            f"--tasks {flags.tasks}: masked and pairs ask an encoder, {', '.join(sorted(others))} do not."
        )
    if flags.checkpoint is None or flags.output is None:
        raise ConfigError(f"evaluate --tasks {flags.tasks} needs --checkpoint DIR --output DIR.")
    lengths = split_lengths(flags.lengths) if flags.lengths else (None,)
    if len(lengths) > 1:
        raise ConfigError(f"--lengths {flags.lengths}: --tasks {flags.tasks} reads rows of one length.")
    rows = flags.samples if flags.samples != Flags().samples else Options.rows
    scores = measure(
        Options(
            checkpoint=flags.checkpoint,
            output=flags.output,
            tasks=tuple(sorted(asked)),
            text=flags.haystack,
            rows=rows,
            seq_len=next(iter(lengths)),
            **flags.ranks.values(),
        ),
        token_progress,
    )
    if environment_rank()[0] != 0:
        return
    if flags.json:
        say_json(scores)
        return
    named = {name: value for name, value in scores.items() if name != "model"}
    say(table(["", scores["model"]], [[name.replace("_", " "), _cell(value)] for name, value in named.items()]) + "\n")
    say(str(flags.output / SCORES))


def _options(flags: Flags) -> Options:
    """The options as values; ConfigError for those that are missing or out of range."""
    from launcher.evaluation.options import LongPPL, Options, split_depths, split_lengths, split_names
    from longctx.evaluation.task import RulerFiles

    if flags.checkpoint is None or flags.output is None or not flags.tasks or not flags.lengths:
        raise ConfigError(
            "evaluate needs --checkpoint DIR --tasks A,B --lengths N,M --output DIR. `--list` names the tasks."
        )
    return Options(
        checkpoint=flags.checkpoint,
        output=flags.output,
        tasks=split_names(flags.tasks),
        lengths=split_lengths(flags.lengths),
        samples=flags.samples,
        haystack=flags.haystack,
        tokenizer=flags.tokenizer,
        seed=flags.seed,
        depths=split_depths(flags.depths),
        answer_tokens=flags.answer_tokens,
        teacher_forced_from=flags.teacher_forced_from,
        chat=flags.chat,
        beyond_positions=flags.beyond_positions,
        ruler=RulerFiles(squad=flags.squad, hotpotqa=flags.hotpotqa, english_words=flags.english_words),
        longppl=LongPPL(truncation=flags.longppl_truncation, window=flags.longppl_window),
        **flags.ranks.values(),
    )


def _evaluate(options: Options, *, as_json: bool) -> None:
    """Evaluate; rank 0 prints the result."""
    import launcher.evaluation.run as evaluation
    from parallel.runtime.launched import environment_rank

    # Every rank measures; one speaks.
    is_rank_0 = environment_rank()[0] == 0
    if is_rank_0:
        _say_what_is_missing(options)
    try:
        page = evaluation.evaluate(options, token_progress)
    except KeyboardInterrupt:
        if is_rank_0:
            note(f"{options.output} holds what was measured: the same command goes on from there.")
        raise
    if is_rank_0:
        _print(options, page, as_json=as_json)


def _say_what_is_missing(options: Options) -> None:
    """Name the tasks of a group that lack their file, and the depths that no sample takes."""
    tasks, _, left_out = options.chosen()
    if left_out:
        note(f"left out, because their files were not given (--squad, --hotpotqa): {', '.join(left_out)}")
    untested = options.depths[options.samples :]
    if untested and any(task.has_depth for task in tasks):
        depths = ", ".join(f"{depth:g}" for depth in untested)
        note(f"--samples {options.samples} leaves these depths without a sample: {depths}")


def token_progress(label: str, total: int | None = None) -> AbstractContextManager[Update]:
    """Progress; of so many tokens with the time left."""
    from launcher.metrics.console import short_number

    if total is None:
        return progress(label)
    return progress(label, total=total, rate=lambda per_second: f"{short_number(per_second)} tokens/s")


def _print(options: Options, page: Path, *, as_json: bool) -> None:
    """The scores and losses, and where all the rest is."""
    from launcher.report.evaluation.folder import load_evaluation
    from launcher.report.evaluation.tables import area_rows, loss_rows, score_rows, summary_of

    evaluation = load_evaluation(options.output)
    if as_json:
        say_json(summary_of(evaluation))
        return
    for rows in (score_rows(evaluation), area_rows(evaluation), loss_rows(evaluation)):
        if rows:
            say(table(list(rows[0]), [[_cell(value) for value in row.values()] for row in rows]) + "\n")
    say(str(page))


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value}"
