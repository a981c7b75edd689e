"""``search_settings``: among a run's possible settings, find those that fit its hardware, and the fastest among them.

Every combination below is estimated, without shortcuts by rules of thumb: arithmetic is cheap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from launcher.config.config_sections import RunConfig
from launcher.config.tokens_per_rank_rules import padded_documents
from launcher.plan.estimate import HEADROOM, estimate_ranks, max_row_tokens, planned, with_rows
from launcher.plan.hardware import Hardware
from launcher.plan.planned_world import RANKS_IN_A_NODE, World
from launcher.plan.seconds import slowest
from launcher.plan.synthetic_documents import uniform_documents
from longctx.errors import ConfigError

_TIE_RATIO = 1.005
"""Ratio below which seconds count as equal: the simpler settings win."""

LAYOUT_KEYS = ("parallel.context", "parallel.ulysses", "parallel.expert", "train.micro_batch_rows")
ZERO_KEYS = ("zero.stage", "zero.offload", "zero.offload_parameters")
ACTIVATION_KEYS = ("train.keep", "train.store", "train.chunk_tokens", "train.head_groups")
SEARCHED = LAYOUT_KEYS + ZERO_KEYS + ACTIVATION_KEYS
"""Keys that the search varies."""
FIXED_DEGREE = ("parallel.context", "train.micro_batch_rows")
"""Keys that ``parallel.tokens_per_rank`` replaces."""

_SHORT_MICRO_BATCH = 32768
"""Tokens per rank up to which several rows at once are worth trying."""


@dataclass(frozen=True, kw_only=True)
class SettingsCandidate:
    """One combination of settings, with its cost."""

    config: RunConfig
    peak_bytes: int
    host_bytes: int
    seconds: float
    """Seconds per step."""
    hardware: Hardware

    @cached_property
    def fits(self) -> bool:
        """True if ``HEADROOM`` of the device stays free and the rank's portion of host memory is enough."""
        return self.fullness <= 1

    @property
    def fullness(self) -> float:
        """Used fraction of usable memory, the larger value for device and host; above 1 it does not fit."""
        hardware = self.hardware
        of_device = self.peak_bytes / (hardware.memory_bytes * (1 - HEADROOM))
        return max(of_device, self.host_bytes / hardware.host_memory_bytes)

    @property
    def settings(self) -> dict[str, Any]:
        """Values of the searched keys; ``parallel.tokens_per_rank`` replaces the keys that it determines."""
        keys = list(SEARCHED)
        if self.config.parallel.tokens_per_rank:
            keys = ["parallel.tokens_per_rank"] + [key for key in SEARCHED if key not in FIXED_DEGREE]
        return {key: self.config.value(key) for key in keys}


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Search result."""

    num_candidates: int
    num_fitting: int
    fastest: SettingsCandidate | None
    """Unset if no settings fit."""
    leanest: SettingsCandidate
    """Candidate nearest to fitting, or with the most memory left."""
    front: list[SettingsCandidate]
    """Pareto front: fitting candidates that no other beats in both memory and time, leanest first."""

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values."""
        front = [
            {"settings": one.settings} | {name: getattr(one, name) for name in ("peak_bytes", "host_bytes", "seconds")}
            for one in self.front
        ]
        return {"tried": self.num_candidates, "fitting": self.num_fitting, "front": front}


def search_settings(
    config: RunConfig,
    world: World,
    hardware: Hardware,
    *,
    document_tokens: int = 0,
    held: Collection[str] = (),
    progress: Callable[[int], None] = lambda _: None,
) -> SearchResult:
    """Try all settings for ``config`` except keys in ``held``; raise ConfigError if all of them would be rejected."""
    if config.parallel.tokens_per_rank:
        # tokens_per_rank determines these keys.
        held = set(held).union(FIXED_DEGREE)
    if config.train.chunk_tokens == "auto":
        # Even if the key was given, "auto" leaves the choice to the search.
        held = set(held) - {"train.chunk_tokens"}
    candidates: list[SettingsCandidate] = []
    rejected: ConfigError | None = None
    for changed in variants(config, world, held, hardware.device_type):
        try:
            candidates.append(_candidate(changed, world, hardware, document_tokens))
        except ConfigError as error:
            rejected = rejected or error
        progress(len(candidates))
    if not candidates:
        assert rejected is not None
        raise rejected
    fitting = [candidate for candidate in candidates if candidate.fits]
    return SearchResult(
        num_candidates=len(candidates),
        num_fitting=len(fitting),
        fastest=_fastest(fitting),
        leanest=min(candidates, key=lambda candidate: candidate.fullness),
        front=_front(fitting),
    )


def fit_rows(
    config: RunConfig, world: World, hardware: Hardware, seq_len: int, *, document_tokens: int = 0
) -> SettingsCandidate | None:
    """Find the fastest settings, with the config's own degrees, that fit rows of this length; return None if none do.

    A step keeps its tokens, as far as they form full rows on every data rank.
    """
    parallel = config.parallel
    groups = max(1, world.ranks // parallel.context)
    rows = -(-max(1, config.train.tokens_per_step // seq_len) // groups) * groups
    longer = with_rows(config, seq_len).changed({"train.tokens_per_step": rows * seq_len})
    together = math.gcd(longer.train.micro_batch_rows, rows // groups)
    longer = longer.changed({"train.micro_batch_rows": together})
    if parallel.tokens_per_rank:
        needed = max(parallel.tokens_per_rank, -(-seq_len // parallel.context))
        longer = longer.changed({"parallel.tokens_per_rank": needed})
    found = _search_or_none(longer, world, hardware, document_tokens, LAYOUT_KEYS)
    if found is None:
        return None
    return found.fastest


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """Nearest alternatives that fit, if no settings do."""

    seq_len: int
    """Longest row on these ranks, with the leanest settings; 0 if no row fits."""
    world: World | None
    """Smallest world, a power of two times the current one, that fits rows of this length."""
    candidate: SettingsCandidate | None
    """Fastest settings in that world."""


def nearest_alternatives(
    leanest: SettingsCandidate,
    world: World,
    *,
    document_tokens: int = 0,
    held: Collection[str] = (),
    most_ranks: int = 1 << 14,
) -> Nearest:
    """Find alternatives that would fit, starting from the leanest settings, which do not."""
    hardware = leanest.hardware
    config = planned(leanest.config, world, hardware, document_tokens=document_tokens)
    longest = max_row_tokens(config, world, hardware, share=1 - HEADROOM)
    ranks = 2 * world.ranks
    while ranks <= most_ranks:
        larger = World(ranks=ranks, ranks_per_node=max(world.ranks_per_node, min(ranks, RANKS_IN_A_NODE)))
        found = _search_or_none(leanest.config, larger, hardware, document_tokens, (*held, *ACTIVATION_KEYS))
        if found is not None and found.fastest is not None:
            return Nearest(seq_len=longest, world=larger, candidate=found.fastest)
        ranks *= 2
    return Nearest(seq_len=longest, world=None, candidate=None)


def _search_or_none(
    config: RunConfig, world: World, hardware: Hardware, document_tokens: int, held: Collection[str]
) -> SearchResult | None:
    try:
        return search_settings(config, world, hardware, document_tokens=document_tokens, held=held)
    except ConfigError:
        # For example, a step may have too few rows for so many ranks.
        return None


# ---------------------------------------------------------------------------------------------------------- candidates


def variants(config: RunConfig, world: World, held: Collection[str], device_type: str = "cuda") -> Iterator[RunConfig]:
    """Yield the combinations, simplest first; a run would reject some of them."""
    groups = (
        _free(LAYOUT_KEYS, _layouts(config, world), held),
        _free(ZERO_KEYS, _states(config, world, device_type), held),
        _free(ACTIVATION_KEYS, _activation_options(config, device_type), held),
    )
    for place, state, way in product(*groups):
        yield _without_unused(config.changed(dict(place) | dict(state) | dict(way)))


def _free(
    names: Sequence[str], options: Iterable[tuple[Any, ...]], held: Collection[str]
) -> list[tuple[tuple[str, Any], ...]]:
    """Return distinct options for keys that are not held, as (key, value) pairs, in order."""
    # Remove held keys before combining options: a search that holds most keys has few combinations.
    return list(
        dict.fromkeys(
            tuple((key, value) for key, value in zip(names, values, strict=True) if key not in held)
            for values in options
        )
    )


def _layouts(config: RunConfig, world: World) -> Iterator[tuple[int, int, int, int]]:
    experts = [1]
    if config.model.num_experts:
        experts = [n for n in _divisors(world.ranks) if config.model.num_experts % n == 0]
    for context in _divisors(world.ranks):
        # Rows per step for each group of ranks that shares a row.
        rows, rest = divmod(config.rows_per_step * context, world.ranks)
        if rest or not rows:
            continue
        micro_batches = [
            n for n in _divisors(rows) if n == 1 or n * config.data.seq_len <= _SHORT_MICRO_BATCH * context
        ]
        for ulysses, expert, micro_batch in product(_divisors(context), experts, micro_batches):
            # All-to-alls that exchange heads between machines are not considered.
            if ulysses <= world.ranks_per_node:
                yield context, ulysses, expert, micro_batch


def _states(config: RunConfig, world: World, device_type: str) -> list[tuple[int, str, str]]:
    """Return ZeRO stages with their offloading; to a disk only if the config names a folder."""
    found = [(stage, "none", "none") for stage in (1, 2, 3)]
    if world.ranks == 1:
        # A single rank has no partitions.
        found = [(1, "none", "none")]
    if device_type != "cpu":
        found += [(1, "cpu", "none"), (2, "cpu", "none"), (3, "cpu", "none"), (3, "cpu", "cpu")]
    if config.zero.nvme_path:
        found += [(3, "nvme", "cpu"), (3, "nvme", "nvme")]
    return found


def _activation_options(config: RunConfig, device_type: str) -> Iterator[tuple[str, str, int, int]]:
    """Yield saved activations, their store, chunk size, and number of head groups."""
    stores = ["device", "host"]
    if device_type == "cpu":
        # On a CPU, device memory is host memory.
        stores = ["device"]
    for keep, store in product(("all", "attention", "inputs"), stores):
        yield keep, store, 0, 1
    if config.train.store_path:
        stores.append("disk")
    key_heads = config.model.num_kv_heads
    groups = [n for n in (1, 2, 4, 8, 16) if key_heads % n == 0 or n % key_heads == config.model.num_heads % n == 0]
    for chunk_tokens, num_groups in product((16384, 8192, 4096, 2048), groups):
        for keep, store in product(("attention", "inputs"), stores):
            yield keep, store, chunk_tokens, num_groups


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _candidate(config: RunConfig, world: World, hardware: Hardware, document_tokens: int) -> SettingsCandidate:
    on_device = planned(config, world, hardware, document_tokens=document_tokens)
    documents = padded_documents(on_device, uniform_documents(on_device, document_tokens))
    ranks, host_bytes = estimate_ranks(on_device, world, hardware, documents)
    return SettingsCandidate(
        config=config,
        peak_bytes=max(rank.bytes.peak for rank in ranks),
        host_bytes=host_bytes,
        seconds=slowest([rank.seconds for rank in ranks]).total,
        hardware=hardware,
    )


def _without_unused(config: RunConfig) -> RunConfig:
    """Clear folders that the settings do not write to."""
    unused = {}
    if config.train.store != "disk":
        unused["train.store_path"] = ""
    if "nvme" not in (config.zero.offload, config.zero.offload_parameters):
        unused["zero.nvme_path"] = ""
    return config.changed(unused)


# --------------------------------------------------------------------------------------------------------- the choice


def _fastest(fitting: Sequence[SettingsCandidate]) -> SettingsCandidate | None:
    """Return the first candidate that is as fast as the best; candidates come simplest first."""
    if not fitting:
        return None
    best = min(candidate.seconds for candidate in fitting)
    return next(candidate for candidate in fitting if candidate.seconds <= best * _TIE_RATIO)


def _front(fitting: Sequence[SettingsCandidate]) -> list[SettingsCandidate]:
    """Return the Pareto front: from the leanest on, each candidate that is faster than all leaner ones."""
    front: list[SettingsCandidate] = []
    for candidate in sorted(fitting, key=lambda one: (one.peak_bytes, one.seconds)):
        if not front or candidate.seconds * _TIE_RATIO < front[-1].seconds:
            front.append(candidate)
    return front
