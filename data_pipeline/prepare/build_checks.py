"""Build checks: options before the build, and documents before the shards are assembled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from data_pipeline.prepare.left_out import left_out_lines
from data_pipeline.prepare.parts.part_record import SPLITS, PartRecord
from data_pipeline.prepare.parts.part_work import EncodeJob
from data_pipeline.prepare.parts.pool import usable_cores
from data_pipeline.prepare.source_items import IMAGES, PAIRS
from data_pipeline.prepare.sources import TextSource
from data_pipeline.shards.shard_writer import DEFAULT_SHARD_TOKENS
from longctx.chat.chat_encoder import REMEDIES
from longctx.chat.chat_rule import ChatRule
from longctx.errors import DataError
from longctx.tokenizer.image_tokenizer import ImageTokenizer
from longctx.tokenizer.tokenizer_base import Tokenizer


def check_paragraphs(source: TextSource) -> None:
    """Raise ``DataError`` unless the source contains texts."""
    if source.fields.kind != "text":
        kind = "pairs" if source.fields.kind == PAIRS else "conversations"
        raise DataError(
            f"--paragraphs records paragraph starts in texts, but {source.spec} contains {kind}. Leave it out."
        )


def check_images(source: TextSource, tokenizer: Tokenizer, job: EncodeJob) -> None:
    """Raise ``DataError`` if source, tokenizer and options are not all for images, or all for texts."""
    is_format = isinstance(tokenizer, ImageTokenizer)
    if (source.fields.kind == IMAGES) != is_format or (job.images is not None) != is_format:
        raise DataError(
            f"{tokenizer.path} is {'an image format' if is_format else 'a text tokenizer'}, but {source.spec} is read "
            f"as {source.fields.kind}. Use --kind images with the format of images, and without it a text tokenizer."
        )
    if is_format and (job.exact or job.paragraphs or job.parse_special_tokens or job.duplicates.finds):
        raise DataError(
            "exact, paragraphs, special tokens and duplicates apply to texts, not to images. Leave them out."
        )


def preference_rule(chat: ChatRule | None) -> ChatRule:
    """Return the rule for preferences, of which the last replies count; raise ``DataError`` for other options."""
    chat = chat or ChatRule()
    if chat.train_on not in (ChatRule().train_on, "last") or chat.too_long != "drop":
        raise DataError(
            f"--train-on {chat.train_on} and --too-long {chat.too_long} apply to conversations: in preferences both "
            "replies count, and longer records are left out. Leave the options out."
        )
    return replace(chat, train_on="last")


def check_parsing(source: TextSource, tokenizer: Tokenizer, *, paragraphs: bool, exact: bool) -> None:
    """Raise ``DataError`` unless control tokens can be found in the source's texts."""
    if source.fields.kind != "text":
        raise DataError(
            f"--special-tokens parse requires texts, but {source.spec} contains other documents. Leave it out."
        )
    if paragraphs:
        raise DataError("--special-tokens parse and --paragraphs cannot be combined. Choose one.")
    if exact:
        raise DataError(
            "--exact compares texts with their decoded ids, but special tokens decode to empty text. Choose --exact or "
            "--special-tokens parse."
        )
    # Raises if the tokenizer's file does not specify how to find control tokens.
    _ = tokenizer.control_finder


def check_numbers(validation_fraction: float, shard_tokens: int, workers: int | None) -> None:
    """Raise ``DataError`` if an option is out of range."""
    if not 0 <= validation_fraction < 1:
        raise DataError(f"validation_fraction={validation_fraction} must be at least 0 and less than 1. Try 0.05.")
    if shard_tokens < 1:
        raise DataError(f"shard_tokens={shard_tokens} must be at least 1. Try {DEFAULT_SHARD_TOKENS}.")
    if workers is not None and workers < 1:
        raise DataError(f"workers={workers} must be at least 1. Omit it to use all {usable_cores()} cores.")


def check_trained(records: list[PartRecord], source: TextSource, chat: ChatRule) -> None:
    """Raise ``DataError`` if more conversations are unusable for training than the rule allows."""
    counts = {reason: source.left_out.counts[reason] for reason in REMEDIES if source.left_out.counts[reason]}
    unusable = sum(counts.values())
    kept = sum(record.splits[split].documents for record in records for split in SPLITS)
    if unusable <= chat.most_left_out * (unusable + kept):
        return
    most = max(counts, key=lambda reason: counts[reason])
    lines = left_out_lines(counts, source.left_out.examples)
    raise DataError(
        f"{unusable:,} conversations in {source.spec} are unusable for training, compared with {kept:,} usable "
        f"documents (--most-left-out {chat.most_left_out:g}).\n"
        + "\n".join(lines)
        + f"\n{REMEDIES[most]}\nAfter changing other options, build again with --overwrite: encoded parts depend on "
        "them. With a higher --most-left-out, the same build resumes."
    )


def check_splits(records: list[PartRecord], source: TextSource, options: dict[str, Any]) -> None:
    """Raise ``DataError`` if there are no documents to train on."""
    counts = {split: sum(record.splits[split].documents for record in records) for split in SPLITS}
    if not sum(counts.values()):
        raise DataError(source.no_documents())
    # Possible with a handful of documents; otherwise a run would fail only at its start.
    if not counts["training"]:
        raise DataError(
            f"All {counts['validation']} documents of {source.spec} were assigned to the validation split "
            f"(validation_fraction={options['validation_fraction']}).\nTry validation_fraction=0 or more documents."
        )
