"""The verb ``attention``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg, create_mutex_group

from launcher.cli.console import note, progress, say
from longctx.errors import ConfigError, DataError

if TYPE_CHECKING:
    from launcher.evaluation.attention import Row, Watched

_INPUT = create_mutex_group(required=True, title="what is read")


def attention(
    *,
    checkpoint: Annotated[Path, arg(metavar="DIR")],
    output: Annotated[Path, arg(metavar="DIR")],
    text: Annotated[str | None, _INPUT, arg(metavar="TEXT")] = None,
    text_file: Annotated[Path | None, _INPUT, arg(metavar="F")] = None,
    data: Annotated[Path | None, _INPUT, arg(metavar="DIR")] = None,
    task: Annotated[str | None, _INPUT, arg(metavar="TASK")] = None,
    length: int | None = None,
    row: int = 0,
    sample: int = 0,
    haystack: Annotated[Path | None, arg(metavar="FOLDER")] = None,
    layer: int | None = None,
    heads: Annotated[str, arg(metavar="N,M")] = "",
    blocks: int = 64,
    tokenizer: Annotated[Path | None, arg(metavar="TOKENIZER")] = None,
) -> None:
    """Draw what the heads of a layer look at.

    Each head gets a picture and a table of its attention by blocks of tokens, masks and documents visible.
    A short row also gets attention.html, where pointing at a token shows what it looks at.
    The model runs on the CPU, in one process; memory does not grow with the square of the length.

    Args:
        checkpoint: Checkpoint, run folder (its newest checkpoint), or Hugging Face folder.
        output: Folder for the files.
        text: A text.
        text_file: UTF-8 file with a text.
        data: Shard folder, of which one packed row is read.
        task: Task of evaluate: its prompt, and the right answer after it.
        length: Tokens of the row of --data, or of prompt and answer of --task.
        row: Row of --data, as data inspect counts them.
        sample: Sample of --task.
        haystack: Text for the task's prompt; by default the run's validation folder.
        layer: Layer, from 0; by default the last one with softmax.
        heads: Heads, from 0; by default all.
        blocks: Most blocks of queries, and of keys.
        tokenizer: For a folder that has none of its own: SentencePiece model, tokenizer.json, or a folder with one.
    """
    from launcher.evaluation.attention import Watched, row_of_shards, row_of_text, write_patterns

    if (data is not None or task is not None) and length is None:
        raise ConfigError("--data and --task need --length N: the tokens of a row, or of prompt and answer.")
    chosen = _numbers(heads)
    with progress(f"loading {checkpoint}"):
        watched = Watched.load(checkpoint, tokenizer)
    found: Row
    if task is not None and length is not None:
        found = _task_row(watched, output, task, length=length, sample=sample, haystack=haystack, tokenizer=tokenizer)
    elif data is not None and length is not None:
        found = row_of_shards(watched.folder, data, seq_len=length, row=row)
    elif text_file is not None:
        found = row_of_text(watched.tokenizer, _read(text_file), text_file.name)
    else:
        found = row_of_text(watched.tokenizer, text or "", "a text")
    with progress(f"reading {len(found.tokens_T):,} tokens"):
        files = write_patterns(watched, found, output, layer=layer, heads=chosen, blocks=blocks)
    for file in files:
        say(str(file))
    _explain_missing_page(len(found.tokens_T))


def _task_row(
    watched: Watched,
    output: Path,
    task: str,
    *,
    length: int,
    sample: int,
    haystack: Path | None,
    tokenizer: Path | None,
) -> Row:
    from launcher.evaluation.attention import row_of_task
    from launcher.evaluation.options import Options

    if sample < 0:
        raise ConfigError(f"--sample {sample}: samples are counted from 0.")
    options = Options(
        checkpoint=watched.folder,
        output=output,
        tasks=(task,),
        lengths=(length,),
        haystack=haystack,
        tokenizer=tokenizer,
        beyond_positions=True,
    )
    return row_of_task(options, sample)


def _numbers(text: str) -> list[int]:
    """``0,3`` as numbers; ConfigError for what is none."""
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise ConfigError(f"--heads {text}: give numbers from 0: --heads 0,3") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--text-file {path} cannot be read: {error}.") from error


def _explain_missing_page(num_tokens: int) -> None:
    """Say why there is no page by tokens."""
    from launcher.report.attention import MOST_TOKENS

    if num_tokens > MOST_TOKENS:
        note(f"No page by tokens: {num_tokens:,} are more than {MOST_TOKENS:,}, of which one is still readable.")
