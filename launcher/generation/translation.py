"""``evaluate --tasks translation``: translate held-out sources and compare them with their targets by sacrebleu.

Prompts are divided among ranks as in ``generate --prompts-file``.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.shards.reader import ShardSet, SourceSide
from launcher.checkpoint.tokenizer_checks import check_checkpoint_tokenizer
from launcher.evaluation.evaluated_model import held_out_shards
from launcher.evaluation.evaluation_run import no_progress
from launcher.evaluation.model_source import ModelSource, open_model, run_of
from launcher.evaluation.rank_setup import build_mesh, joined_ranks
from launcher.generation.generation_options import GenerationCommandOptions as GenerationCommandOptions
from launcher.generation.generation_options import PromptLine, PromptSource
from launcher.generation.generation_run import GenerationSession
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.files import write_synced
from longctx.generation.beams import Beams
from longctx.generation.sampling import Greedy
from parallel.comm.world import on_every_rank, on_rank_0, own_rank

NAME = "translation"
ROWS, SCORES = "translation.jsonl", "translation.json"
_LONGER, _EXTRA_TOKENS = 2, 16
"""Default answer limit: this multiple of the longest source's tokens, plus this many."""


@dataclass(frozen=True, kw_only=True)
class Translation:
    """Options for the translation task, except those for ranks."""

    output: Path
    pairs: str | None = None
    """Folder with pairs, or its URL; by default the checkpoint run's held-out split."""
    samples: int | None = None
    """Number of pairs to read, from the first; by default all."""
    beams: int = 1
    length_penalty: float = 1.0
    answer_tokens: int | None = None
    """Maximum tokens per answer."""

    def __post_init__(self) -> None:
        if self.samples is not None and self.samples < 1:
            raise ConfigError(f"--samples {self.samples} must be at least 1; without the option, all pairs are read.")
        if self.beams < 1:
            raise ConfigError(f"--beams {self.beams} must be at least 1 (greedy decoding). Try --beams 4.")
        if self.answer_tokens is not None and self.answer_tokens < 1:
            raise ConfigError(
                f"--answer-tokens {self.answer_tokens} must be at least 1; the default is {_LONGER} times the longest "
                f"source plus {_EXTRA_TOKENS}."
            )


Update = Callable[..., None]
Progress = Callable[..., AbstractContextManager[Update]]


def translate_pairs(
    options: Translation, inference_options: dict[str, Any], checkpoint: Path, progress: Progress
) -> dict[str, Any]:
    """Evaluate on the ranks that a launcher started, or in this process; return the scores on rank 0. Collective.

    ``inference_options`` has the fields of ``Computation``. Raise ConfigError for a model without an encoder, or if
    sacrebleu is not installed.
    """
    strategy = Beams(num_beams=options.beams, length_penalty=options.length_penalty) if options.beams > 1 else Greedy()
    # The answer limit depends on the sources, which are read after joining the ranks: start with a placeholder.
    base_options = GenerationCommandOptions(
        checkpoint=checkpoint,
        prompts=PromptSource(lines=options.output),
        max_new_tokens=1,
        strategy=strategy,
        **inference_options,
    )
    with joined_ranks(base_options) as device:
        model_source = on_every_rank(lambda: _open(checkpoint))
        mesh = build_mesh(model_source.model, context=base_options.context, expert=base_options.expert)
        # Rank 0 reads the pairs and writes the results.
        found: list[_Texts] = []
        ids, longest = on_rank_0(lambda: _read(options, model_source, found))
        # Sessions take ids; the prompt texts are not used.
        prompts = [PromptLine("", {})] * len(ids)
        options_with_limit = GenerationCommandOptions(**{**vars(base_options), "max_new_tokens": longest})
        session = GenerationSession(options_with_limit, model_source, mesh, device, prompts, ids, set())
        # Load the model only after all input checks.
        session.load()
        written: list[list[int]] = []
        bar = progress if own_rank() == 0 else no_progress
        with bar("translating", len(ids)) as update:
            for index, tokens in session.each():
                written.append(tokens)
                update(index + 1)
        return on_rank_0(lambda: _score(options, found[0], written))


@dataclass(frozen=True)
class _Texts:
    """Sources to translate, with their references."""

    model_source: ModelSource
    sources: list[array[int]]
    references: list[str]
    left_out: int
    """Pairs that were read but have a source longer than the model's positions."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, ignoring those that the tokenizer lacks."""
        tokenizer = self.model_source.tokenizer
        return tokenizer.decode([token for token in ids if token < tokenizer.vocab_size])

    def longest(self, options: Translation) -> int:
        """Return the maximum tokens per answer."""
        wanted = options.answer_tokens
        if wanted is None:
            # Use the sources only: the lengths of the references would be a hint.
            wanted = _LONGER * max(map(len, self.sources)) + _EXTRA_TOKENS
        return min(wanted, self.model_source.model.max_positions - 1)


def _open(checkpoint: Path) -> ModelSource:
    """Open a translation model; raise ConfigError if it has no encoder."""
    _scorers()
    model_source = open_model(checkpoint, None)
    if not model_source.model.encoder_layers:
        raise ConfigError(
            f"{checkpoint} has no encoder (model.encoder_layers=0), so it cannot translate. Use a model trained on "
            "pairs; `evaluate --list` lists tasks for other models."
        )
    return model_source


def _read(options: Translation, model_source: ModelSource, found: list[_Texts]) -> tuple[list[array[int]], int]:
    """Add the texts to ``found``; return the sources' ids, and the maximum tokens per answer.

    Pairs with a source longer than the model's positions are left out, as in training. Raise ConfigError if no pair is
    left.
    """
    shards = _pairs(options, model_source)
    if not shards.manifest.has_sources:
        raise ConfigError(f"{shards.folder} holds no pairs. Name a folder built with --source-field: --pairs FOLDER.")
    check_checkpoint_tokenizer(model_source.folder, shards)
    if not shards.num_documents:
        raise ConfigError(f"{shards.folder} holds no documents. Name another folder with pairs: --pairs FOLDER.")
    count = min(options.samples or shards.num_documents, shards.num_documents)
    side = SourceSide(shards)
    fitting = _fitting(side.lengths_of(np.arange(count)), model_source.model, shards)
    # From 0 to the largest length: full documents.
    pieces = [(number, 0, np.iinfo(np.int32).max) for number in fitting]
    sources = [array("i", ids.tolist()) for ids in side.slices(pieces)]
    targets = shards.slices(pieces)
    references = [model_source.tokenizer.decode(ids) for ids in targets]
    texts = _Texts(model_source, sources, references, left_out=count - len(fitting))
    found.append(texts)
    options.output.mkdir(parents=True, exist_ok=True)
    return sources, texts.longest(options)


def _fitting(lengths: np.ndarray, model: ModelConfig, shards: ShardSet) -> list[int]:
    """Return the indices of sources that fit the model's positions; raise ConfigError if no source fits."""
    fitting = np.flatnonzero(lengths <= model.max_positions).tolist()
    if fitting:
        return fitting
    hint = "Name pairs with shorter sources: --pairs FOLDER"
    if len(lengths) < shards.num_documents:
        hint = f"Read more pairs (--samples N, up to {shards.num_documents:,}), or name others: --pairs FOLDER"
    raise ConfigError(
        f"the sources of the {len(lengths):,} pairs read from {shards.folder} all exceed the model's "
        f"{model.max_positions:,} positions (model.max_positions): the shortest has {lengths.min():,} tokens.\n{hint}"
    )


def _pairs(options: Translation, model_source: ModelSource) -> ShardSet:
    """Return the named folder with pairs, by default the held-out split of the checkpoint's run."""
    found = held_out_shards(options.pairs, run_of(model_source.folder), option="--pairs")
    if found is not None:
        return found
    raise ConfigError(
        f"translation needs held-out pairs, and {model_source.folder} is not in a run with an available validation "
        "folder.\nName a folder with pairs: --pairs FOLDER"
    )


def _scorers() -> Any:
    """Return sacrebleu's metrics; raise ConfigError if it is not installed."""
    try:
        from sacrebleu import metrics
    except ImportError as error:
        raise ConfigError(
            "translation is scored by sacrebleu, which is not installed: pip install 'longctx-train[bleu]'."
        ) from error
    return metrics


def _score(options: Translation, texts: _Texts, ids: list[list[int]]) -> dict[str, Any]:
    """Write every pair with its translation, and the scores; return the scores."""
    written = [texts.decode(tokens) for tokens in ids]
    rows = [
        {"source": texts.decode(source), "reference": reference, "written": text}
        for source, reference, text in zip(texts.sources, texts.references, written, strict=True)
    ]
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_synced(options.output / ROWS, content.encode())
    scores: dict[str, Any] = {
        "model": texts.model_source.name,
        "pairs": len(rows),
        "left_out": texts.left_out,
        "beams": options.beams,
    }
    metrics = _scorers()
    for name, metric in (("bleu", metrics.BLEU()), ("chrf", metrics.CHRF())):
        score = metric.corpus_score(written, [texts.references])
        # The signature contains sacrebleu's version and settings: only scores with equal signatures compare.
        scores[name] = {"score": score.score, "signature": str(metric.get_signature())}
    write_synced(options.output / SCORES, json.dumps(scores, indent=2).encode() + b"\n")
    return scores
