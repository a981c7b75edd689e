"""Mixture description as plain values: its sources and stages, with each source's share of the tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from data_pipeline.mixture.file import Mixture, Stage
from data_pipeline.rows.packing_checks import check_mixture_sources
from data_pipeline.shards.manifest import Manifest
from longctx.errors import DataError


@dataclass(frozen=True, kw_only=True)
class SourceView:
    """One source in a mixture."""

    name: str
    folder: str
    documents: int
    tokens: int
    epochs: int | None
    """Maximum number of epochs; None: no limit."""


@dataclass(frozen=True, kw_only=True)
class MixtureView:
    """Mixture statistics."""

    sources: list[SourceView]
    stages: list[Stage]
    shares: list[tuple[float, ...]]
    """Token share per source from the start, and then from each stage."""


def describe_mixture(path: str | Path) -> MixtureView:
    """Return a mixture's sources and stages, read from manifests; raise ConfigError or DataError if one is invalid."""
    mixture = Mixture.load(path)
    folders = mixture.folders(Path(path).parent)
    manifests = [Manifest.load(folder) for folder in folders]
    check_mixture_sources(path, zip((source.name for source in mixture.sources), manifests, strict=True))
    kinds = {manifest.kind: source.name for source, manifest in zip(mixture.sources, manifests, strict=True)}
    if len(kinds) > 1:
        (kind, first), (other, second) = sorted(kinds.items(), reverse=True)[:2]
        raise DataError(f"{path}: {first} contains {kind}, {second} {other or 'texts'}. A run reads only one kind.")
    sources = [
        SourceView(
            name=source.name,
            folder=str(folder),
            documents=manifest.documents,
            tokens=manifest.tokens,
            epochs=source.epochs,
        )
        for source, folder, manifest in zip(mixture.sources, folders, manifests, strict=True)
    ]
    tokens = [source.tokens for source in sources]
    shares = [mixture.shares(number, tokens) for number in range(-1, len(mixture.stages))]
    return MixtureView(sources=sources, stages=list(mixture.stages), shares=shares)
