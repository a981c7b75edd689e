"""The verb ``data practice``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from launcher.cli.console import command, human_bytes, progress, say
from longctx.errors import ConfigError, DataError

_Range = tuple[int, int]


def practice(
    *,
    output: Annotated[Path, arg(metavar="F.jsonl")],
    documents: int,
    words: Annotated[_Range, arg(metavar="FEWEST MOST")] = (0, 60),
    pairs: Annotated[_Range, arg(metavar="FEWEST MOST")] = (1, 8),
    mentions: Annotated[_Range, arg(metavar="FEWEST MOST")] = (1, 2),
    questions: Annotated[_Range, arg(metavar="FEWEST MOST")] = (1, 4),
    kind: Literal["number", "word", "uuid"] = "word",
    seed: int = 0,
    messages: bool = False,
    overwrite: bool = False,
) -> None:
    """Write documents from which a model learns recall: codes hidden in plain sentences, then questions for them.

    They read as the prompts of the task niah, answers included. The same options give the same file.

    Args:
        output: File to write, a JSON object with the field "text" a line.
        documents: Documents to write.
        words: Words of plain sentences in a document.
        pairs: Pairs of a key and its code in a document. Without any (0 0) it is plain sentences: a haystack.
        mentions: How often a pair stands in the text.
        questions: Questions at the end, each for another pair.
        kind: Of what a code consists.
        seed: Seed of all that is drawn.
        messages: Write conversations, with the field "messages": a user asks, an assistant answers.
        overwrite: Replace a file that is there.
    """
    from longctx.evaluation.practice import Practice
    from longctx.files import write_atomically

    if documents < 1:
        raise ConfigError(f"--documents {documents}: give 1 or more.")
    if output.exists() and not overwrite:
        raise DataError(f"output={output} exists. Name another file, or replace it with --overwrite.")
    # Checked before writing.
    drawn = Practice(words=words, pairs=pairs, mentions=mentions, questions=questions, kind=kind, seed=seed)

    # In memory until all are done: an interrupted file would look like a smaller one.
    lines = []
    with progress("writing documents", total=documents) as update:
        # A document depends only on its number and the options.
        for number in range(documents):
            record: dict[str, object] = {"text": drawn.document(number)}
            if messages:
                record = {"messages": drawn.conversation(number)}
            lines.append(json.dumps(record))
            update(number + 1)
    text = "".join(f"{line}\n" for line in lines).encode()
    write_atomically(output, text)
    say(f"{output}: {documents:,} documents, {human_bytes(len(text))}.")
    say(f"Next: {command('data', 'build', '--source', output, '--tokenizer', 'TOKENIZER', '--output', 'DIR')}")
