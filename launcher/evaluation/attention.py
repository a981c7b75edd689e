"""``attention``: what heads of a checkpoint look at in a text, a packed row or a task's prompt, as files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from data_pipeline.rows.batches import build_batch
from data_pipeline.rows.pack import plan_rows
from data_pipeline.shards.reader import ShardSet
from launcher.checkpoint.tokenizers import check_same_tokenizer, check_vocabulary, tokenizer_of
from launcher.evaluation.options import Options
from launcher.evaluation.subject import model_name, open_subject
from launcher.report.attention import MOST_TOKENS, pattern_figure, pattern_rows, token_page
from launcher.report.evaluation.tables import write_csv
from launcher.report.figures import standalone
from longctx.batch import PADDING_DOCUMENT, PackedDocuments
from longctx.errors import ConfigError
from longctx.evaluation.patterns import Blocks, HeadPattern, attention_patterns
from longctx.files import write_atomically
from longctx.generation.load import find_model, load_model
from longctx.generation.text import TextStream
from longctx.model.decoder import Decoder
from longctx.tokenizer import Tokenizer

PAGE_FILE = "attention.html"


@dataclass(frozen=True, eq=False, kw_only=True)
class Row:
    """The tokens that heads are watched on."""

    name: str
    """What they are, for captions."""
    tokens_T: Tensor
    positions_T: Tensor
    documents: PackedDocuments
    document_ids_T: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Watched:
    """A loaded model and its tokenizer."""

    folder: Path
    model: Decoder
    tokenizer: Tokenizer

    @classmethod
    def load(cls, checkpoint: Path, tokenizer: Path | None) -> Watched:
        """The model of a checkpoint, on the CPU in float32."""
        folder = find_model(checkpoint)
        own = tokenizer_of(folder, tokenizer)
        model = load_model(folder)
        check_vocabulary(own, model.config)
        return cls(folder=folder, model=model, tokenizer=own)


def row_of_text(tokenizer: Tokenizer, text: str, name: str) -> Row:
    """A text as the beginning of a document."""
    ids = tokenizer.encode_prompt(text)
    if not ids:
        raise ConfigError("the text is empty: there is no token to look from.")
    tokens_T = torch.tensor(ids)
    return Row(
        name=name,
        tokens_T=tokens_T,
        positions_T=torch.arange(len(ids)),
        documents=PackedDocuments.of(None, len(ids)),
        document_ids_T=torch.zeros_like(tokens_T),
    )


def row_of_shards(checkpoint: Path, data: Path, *, seq_len: int, row: int) -> Row:
    """A packed row of the first epoch, as ``data inspect --row`` shows it and training reads it (seed 0)."""
    shards = ShardSet.open(data, verify=False)
    check_same_tokenizer(checkpoint, shards)
    plan = plan_rows(shards.lengths, seq_len, seed=0, epoch=0, shuffle=True)
    if not 0 <= row < plan.num_rows:
        raise ConfigError(f"--row {row}: {data} has rows 0 to {plan.num_rows - 1} at --seq-len {seq_len}.")
    batch = build_batch(shards, [plan.row(row)], seq_len)
    return Row(
        name=f"row {row} of {data}",
        tokens_T=batch.tokens[0],
        positions_T=batch.positions[0],
        documents=batch.documents,
        document_ids_T=batch.document_ids[0],
    )


def row_of_task(options: Options, sample: int) -> Row:
    """A task's prompt of the first length, and the right answer after it."""
    subject = open_subject(options)
    tasks, measures, _ = options.chosen()
    if measures or len(tasks) != 1:
        raise ConfigError(f"--task {','.join(options.tasks)}: name one task with prompts. `evaluate --list` has all.")
    made = next(iter(tasks[0].samples(subject.setting, options.lengths[0], sample + 1, start=sample)))
    name = f"{made.task}, sample {sample}"
    if made.depth is not None:
        name += f" at depth {made.depth:g}"
    return row_of_text(subject.tokenizer, made.prompt + made.target, name)


def write_patterns(
    watched: Watched, row: Row, output: Path, *, layer: int | None, heads: Sequence[int], blocks: int
) -> list[Path]:
    """Write a table and a picture of each head, and for a short row the page by tokens; returns the files to open."""
    config = watched.model.config
    if layer is None:
        # The last layer with softmax: recall ends there.
        layer = max((n for n in range(config.num_layers) if config.layer_kind(n) != "linear"), default=0)

    def patterns_of(most_blocks: int) -> list[HeadPattern]:
        return attention_patterns(
            watched.model, row.tokens_T, row.positions_T, row.documents, layer=layer, heads=heads, blocks=most_blocks
        )

    written = []
    for pattern in patterns_of(blocks):
        name = f"attention_layer{pattern.layer}_head{pattern.head}"
        picture = pattern_figure(pattern, _caption(watched, row, pattern.blocks, f"head {pattern.head}", layer), name)
        write_atomically(output / f"{name}.svg", standalone(picture).encode())
        write_csv(output / f"{name}.csv", pattern_rows(pattern))
        written.append(output / f"{name}.svg")
    num_tokens = len(row.tokens_T)
    if num_tokens <= MOST_TOKENS:
        singles = patterns_of(num_tokens)
        page = token_page(
            singles,
            token_texts(watched.tokenizer, row),
            row.document_ids_T.tolist(),
            title=f"Attention of {model_name(watched.folder)}",
            caption=_caption(watched, row, singles[0].blocks, f"{len(singles)} heads", layer),
        )
        write_atomically(output / PAGE_FILE, page.encode())
        written.append(output / PAGE_FILE)
    return written


def token_texts(tokenizer: Tokenizer, row: Row) -> list[str]:
    """What each token stands for; of one without text of its own, how the tokenizer's file spells it."""
    texts: list[str] = []
    stream = TextStream(tokenizer.decode, [])
    for token, document in zip(row.tokens_T.tolist(), row.document_ids_T.tolist(), strict=True):
        # A model's vocabulary may be padded beyond its tokenizer's.
        if document == PADDING_DOCUMENT or token >= tokenizer.vocab_size:
            texts.append("·")
            continue
        texts.append(stream.add(token) or tokenizer.piece(token))
    return texts


def _caption(watched: Watched, row: Row, blocks: Blocks, heads: str, layer: int) -> str:
    """Model, head, text, length, date and n."""
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    cut = f"blocks of {blocks.size}"
    if blocks.size == 1:
        cut = "token by token"
    return (
        f"{model_name(watched.folder)} · layer {layer}, {heads} · {row.name} · "
        f"length {blocks.num_tokens:,}, {cut} · {date} · n = {blocks.num_tokens:,} queries"
    )
