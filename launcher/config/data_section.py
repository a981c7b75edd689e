"""The ``[data]`` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from data_pipeline.rows.pack import Kind


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Training and validation data."""

    train: str = "runs/data"
    """Shard folder to train on, as written by `data build`, or its URL (s3://BUCKET/FOLDER, gs://BUCKET/FOLDER); or the
    .toml file for a mixture of several."""
    validation: str = ""
    """Shard folder or mixture for validation; empty: the "validation" folders inside those in data.train."""
    cache: str = ""
    """Folder on each host for copies of shards that are packed or in a store; empty: $LONGCTX_CACHE/data, otherwise
    ~/.cache/longctx/data. Its disk must have room for all of them."""
    seq_len: int = 2048
    """Tokens per row; longer documents are cut into rows of this length. For pairs it is the length of the targets'
    row, and no pair is cut."""
    source_seq_len: int = 0
    """Maximum source tokens next to a row of pairs, for a model with model.encoder_layers; 0 for texts. A pair that is
    too long on either side is left out and counted."""
    packing: Kind = "best_fit"
    """How documents become rows: best_fit cuts no document that fits in one row; concatenate joins them end to end and
    cuts at each row's end; one_document gives each row one piece and padding. Validation packs by best_fit."""
    min_rest_tokens: int = 1
    """Minimum tokens in the last piece of a document longer than a row; a shorter piece is left out. 1 keeps all."""
    fim_rate: float = 0.0
    """Share of documents with the middle to be filled in: prefix, suffix, then the middle. 0 disables. Needs a
    tokenizer with ids for the three, as made by `tokenizer train --fim`. Not applied in validation."""
    fim_spm_rate: float = 0.5
    """Share of these with the suffix first."""
    fim_segment_tokens: int = 0
    """A document longer than this is filled in by segments of this many tokens, which must divide the tokens per row;
    0: data.seq_len, or with a mixture's stages the largest number that divides all their rows."""
    span_length: float = 3.0
    """With train.objective=spans, mean tokens per removed span. A row has one sentinel for each span in its pieces, as
    made by `tokenizer train --sentinels`."""
    mask_rate: float = 0.15
    """With train.objective=spans, share of tokens that are removed; with masked, share of tokens to predict: 80 % of
    them are read as the tokenizer's mask, 10 % as another token, 10 % unchanged. Needs a tokenizer with a mask, as made
    by `tokenizer train --mask`."""
    mask_whole_words: bool = False
    """Mask words instead of tokens."""
    mask_static: bool = False
    """Mask the same tokens in every epoch."""
    flip: bool = False
    """Mirror half of an epoch's images left to right, others in each epoch. Not applied in validation."""
    share_prompts: Literal["auto", "on", "off"] = "auto"
    """With train.objective=preferences, compute a record's prompt once for both replies: auto does if one rank reads a
    row and all layers are softmax attention. It changes which records fit a row, so choose off for a run that will
    resume on other degrees."""
    balance: bool = True
    """Assign a step's rows to data ranks by their work, including attention within documents, instead of in order: no
    rank waits for one with longer documents. The step's loss and gradient do not change."""
    prefetch_steps: int = 1
    """Steps to read ahead while others are computed; 0: each step waits for its own reading."""
    workers: int = 1
    """Threads that read a step's micro-batches. More of them help if storage responds slowly."""
    verify: Literal["read", "start", "off"] = "read"
    """When shards are verified against their checksums: read verifies data as it is read; start also reads everything
    before the first step, each shard once unless its size, times or inode change, divided among ranks; off never."""
