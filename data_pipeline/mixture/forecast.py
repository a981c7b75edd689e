"""How much of each source a run will take, before it takes any: shares and epochs, in arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data_pipeline.mixture.file import Mixture


@dataclass(frozen=True, kw_only=True)
class SourceForecast:
    """One source of a run."""

    name: str
    tokens: float
    """Those that the run will have taken at its end."""
    epochs: float
    """How often that is all the source has, upsampling counted."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a run takes of a mixture. Rows count as full: what padding takes is not known before."""

    sources: list[SourceForecast]
    missing_tokens: float
    """What no source has left at the end of the run; 0 where it is not used up."""


def forecast(mixture: Mixture, taken: Sequence[int], epoch_tokens: Sequence[int], *, begin: int, end: int) -> Forecast:
    """That of the run's tokens from ``begin`` to ``end``.

    ``taken`` are the tokens of each source that came before, ``epoch_tokens`` those of an epoch of it.
    """
    tokens = [float(count) for count in taken]
    limits = [
        float("inf") if source.epochs is None else float(source.epochs * count)
        for source, count in zip(mixture.sources, epoch_tokens, strict=True)
    ]
    ends = [stage.from_tokens for stage in mixture.stages if begin < stage.from_tokens < end]
    missing, at = 0.0, float(begin)
    # Between two ends shares are what they are, until a source has given all it has.
    for until in (*ends, end):
        shares = mixture.shares(mixture.stage_at(int(at)), epoch_tokens)
        while until > at:
            live = [n for n, share in enumerate(shares) if share and tokens[n] < limits[n]]
            if not live:
                missing += until - at
                break
            whole = sum(shares[n] for n in live)
            # To the end of the stage, or until the first of them has given its epochs.
            step = min(until - at, *((limits[n] - tokens[n]) * whole / shares[n] for n in live))
            for n in live:
                tokens[n] = min(tokens[n] + step * shares[n] / whole, limits[n])
                if limits[n] - tokens[n] < 0.5:
                    tokens[n] = limits[n]
            at += step
        at = float(until)
    sources = [
        SourceForecast(name=source.name, tokens=tokens[n], epochs=tokens[n] / max(epoch_tokens[n], 1))
        for n, source in enumerate(mixture.sources)
    ]
    return Forecast(sources=sources, missing_tokens=missing)
