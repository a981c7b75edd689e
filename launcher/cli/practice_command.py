"""The verb ``data practice``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from launcher.cli.cli_output import command_line, human_bytes, print_line, progress
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
    """Write documents that teach recall: codes hidden in plain sentences, then questions about them.

    They have the form of prompts in the niah task, including the answers. The same options give the same file.

    Args:
        output: File to write: a JSON object with the field "text" per line.
        documents: Documents to write.
        words: Words in plain sentences per document.
        pairs: Key and code pairs per document. 0 0 gives only plain sentences: a haystack.
        mentions: Times that a pair appears in the text.
        questions: Questions at the end, each about another pair.
        kind: Content of a code.
        seed: Seed for all random choices.
        messages: Write conversations, with the field "messages": a user asks, an assistant answers.
        overwrite: Replace an existing file.
    """
    from longctx.evaluation.recall_documents import Practice
    from longctx.files import write_atomically

    if documents < 1:
        raise ConfigError(f"--documents {documents}: give 1 or more.")
    if output.exists() and not overwrite:
        raise DataError(f"output={output} exists. Name another file, or replace it with --overwrite.")
    # Creating it validates the options before anything is written.
    generator = Practice(words=words, pairs=pairs, mentions=mentions, questions=questions, kind=kind, seed=seed)

    # Kept in memory until all are done: an interrupted file would look like a smaller one.
    lines = []
    with progress("writing documents", total=documents) as update:
        # A document depends only on its number and the options.
        for number in range(documents):
            record: dict[str, object] = {"text": generator.document(number)}
            if messages:
                record = {"messages": generator.conversation(number)}
            lines.append(json.dumps(record))
            update(number + 1)
    text = "".join(f"{line}\n" for line in lines).encode()
    write_atomically(output, text)
    print_line(f"{output}: {documents:,} documents, {human_bytes(len(text))}.")
    print_line(
        f"Next: {command_line('data', 'build', '--source', output, '--tokenizer', 'TOKENIZER', '--output', 'DIR')}"
    )
