"""Rotary position frequencies, original and scaled. Imports no tensor library.

``longctx/model/rotary.py`` applies the rotation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from longctx.architecture.types import check_types
from longctx.errors import ConfigError
from longctx.untrusted.strict_json import shown

ROPE_KINDS = ("default", "linear", "ntk", "dynamic", "yarn", "longrope", "llama3", "proportional")

_READ_BY = {
    "factor": ROPE_KINDS[1:],
    "attention_factor": ("yarn", "longrope"),
    "beta_fast": ("yarn",),
    "beta_slow": ("yarn",),
    "mscale": ("yarn",),
    "mscale_all_dim": ("yarn",),
    "truncate": ("yarn",),
    "query_growth": ("dynamic", "yarn", "longrope", "llama3"),
    "low_freq_factor": ("llama3",),
    "high_freq_factor": ("llama3",),
    "short_factor": ("longrope",),
    "long_factor": ("longrope",),
}
"""Kinds that read each field; on any other kind the field would have no effect."""

_UPPER_BOUNDS = {"theta": 1e30, "factor": 1e9, "original_max_positions": 2**40}
_UPPER_BOUNDS |= dict.fromkeys(("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"), 1e9)
_UPPER_BOUNDS |= dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim", "query_growth"), 1e9)
"""Upper bounds far above any model, low enough that no power overflows."""


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions (arXiv 2104.09864): position p rotates channel pair c by p · frequency(c).

    All kinds except ``default`` extend a model trained on ``original_max_positions`` tokens. 0 means unset.
    """

    theta: float = 10_000.0
    """Base for the frequencies theta^(-2c / rotary size)."""
    kind: str = "default"
    """Frequency scaling: default; linear (position interpolation, arXiv 2306.15595); ntk (theta grows once for all
    lengths) and dynamic (theta grows with the sequence); yarn (arXiv 2309.00071); longrope (arXiv 2402.13753); llama3
    (Llama 3.1); proportional (linear over the full head, whose slowest pairs stay unrotated: Gemma 4)."""
    factor: float = 1.0
    """Context extension factor: how many times longer sequences become."""
    original_max_positions: int = 0
    """Context length in training, in tokens; required for dynamic, yarn, longrope and llama3."""
    partial: float = 1.0
    """Fraction of each head's channels that is rotary; the others carry no position."""
    interleaved: bool = False
    """Pair channels 2c and 2c + 1 (DeepSeek) instead of c and c + half (Llama)."""
    attention_factor: float = 0.0
    """Factor on cosines and sines for yarn and longrope; 0 uses the kind's own rule."""
    beta_fast: float = 32.0
    """yarn: pairs with more rotations than this within the original length keep their frequency."""
    beta_slow: float = 1.0
    """yarn: pairs with fewer rotations than this have their frequency divided by factor."""
    mscale: float = 0.0
    """yarn: weight for log(factor) in the attention factor (DeepSeek)."""
    mscale_all_dim: float = 0.0
    """yarn: the same for the part that scales full scores, not only rotated channels (DeepSeek)."""
    truncate: bool = True
    """yarn: round the bounds between kept and divided pairs to integers."""
    query_growth: float = 0.0
    """Scale queries by 1 + query_growth · ln(1 + ⌊position / original_max_positions⌋) (Ministral 3); 0 disables it."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_max_positions over this have their frequency divided by factor."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_max_positions over this keep their frequency."""
    short_factor: tuple[float, ...] = ()
    """longrope: frequency divisor per channel pair, up to the original length."""
    long_factor: tuple[float, ...] = ()
    """longrope: frequency divisor per channel pair, beyond the original length."""

    def __post_init__(self) -> None:
        check_types(self, "model.rope")
        if self.kind not in ROPE_KINDS:
            raise ConfigError(f"model.rope.kind={shown(self.kind)} is unknown. Try one of {list(ROPE_KINDS)}.")
        self._check_numbers()
        self._check_kind()
        if self.kind == "yarn":
            self._check_yarn()

    def check_size(self, rotary_size: int) -> None:
        """Raise ConfigError unless a head can have ``rotary_size`` rotary channels."""
        # Rotation acts on channel pairs.
        if rotary_size < 2 or rotary_size % 2:
            raise ConfigError(
                f"model.rope has {rotary_size} rotary channels per head; it must be an even number of at least 2. "
                "Change model.head_dim or model.rope.partial (with latent attention, model.rope_head_dim)."
            )
        for name in ("short_factor", "long_factor"):
            given = getattr(self, name)
            if self.kind == "longrope" and (len(given) != rotary_size // 2 or any(not 0 < f < math.inf for f in given)):
                raise ConfigError(
                    f"model.rope.{name} has {len(given)} values; longrope needs {rotary_size // 2} positive ones, "
                    "one per channel pair."
                )

    @property
    def is_full_head(self) -> bool:
        """True if every channel in a head has an angle."""
        return self.kind == "proportional" or self.partial == 1

    def rotary_size(self, head_dim: int) -> int:
        """Return rotary channels per head, including those with angle 0."""
        if self.kind == "proportional":
            return head_dim
        return int(head_dim * self.partial)

    @property
    def depends_on_length(self) -> bool:
        """True if frequencies change with sequence length."""
        return self.kind in ("dynamic", "longrope")

    def frequencies(self, rotary_size: int, length: int = 0) -> list[float]:
        """Return radians per token for each of the ``rotary_size / 2`` channel pairs.

        ``length`` is the longest full document over all ranks; only dynamic and longrope read it.
        """
        base = [self._theta(rotary_size, length) ** (-2 * c / rotary_size) for c in range(rotary_size // 2)]
        if self.kind == "linear":
            return [f / self.factor for f in base]
        if self.kind == "proportional":
            # The slowest pairs, beyond the rotary share, have frequency 0.
            rotating = int(self.partial * rotary_size // 2)
            return [f / self.factor * (c < rotating) for c, f in enumerate(base)]
        if self.kind == "yarn":
            return self._yarn_frequencies(base, rotary_size)
        if self.kind == "longrope":
            # One table serves the full batch, as in transformers: one long document changes short ones too.
            divisors = self.short_factor
            if length > self.original_max_positions:
                divisors = self.long_factor
            return [f / divisor for f, divisor in zip(base, divisors, strict=True)]
        if self.kind == "llama3":
            return [self._llama3_frequency(f) for f in base]
        return base

    def scale(self) -> float:
        """Return the factor on cosines and sines; its square scales the rotated channels' term in every score."""
        if self.attention_factor:
            return self.attention_factor
        if self.kind == "yarn":
            # DeepSeek splits the factor: one part scales rotated channels, the other full scores (``score_scale``).
            if self.mscale and self.mscale_all_dim:
                return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
            return _mscale(self.factor, 1.0)
        if self.kind == "longrope" and self.factor > 1:
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_positions))
        return 1.0

    def score_scale(self) -> float:
        """Return the factor on full scores: DeepSeek's ``mscale_all_dim`` scale, squared; 1 for other models."""
        if self.kind != "yarn" or not self.mscale_all_dim:
            return 1.0
        return _mscale(self.factor, self.mscale_all_dim) ** 2

    def _theta(self, rotary_size: int, length: int) -> float:
        """Return the base, raised so that the slowest pair rotates ``factor`` times slower (NTK-aware scaling)."""
        if self.kind == "ntk":
            growth = self.factor
        elif self.kind == "dynamic":
            # Dynamic NTK: growth is 1 up to the original length, and increases with the length beyond it.
            growth = self.factor * max(length / self.original_max_positions, 1) - (self.factor - 1)
        else:
            return self.theta
        # A single pair has frequency 1 for every base, and the exponent below would divide by 0.
        if rotary_size <= 2:
            return self.theta
        # With d = rotary_size, the slowest pair has frequency theta^(-(d - 2)/d), so growth^(d/(d - 2)) divides it by
        # growth.
        return self.theta * growth ** (rotary_size / (rotary_size - 2))

    def _check_kind(self) -> None:
        """Raise ConfigError for fields that the kind ignores, and for missing fields that it needs."""
        # An option without effect is an error: the model would differ from the intended one.
        for name, kinds in _READ_BY.items():
            value = getattr(self, name)
            if self.kind not in kinds and value != _DEFAULTS[name]:
                raise ConfigError(
                    f"model.rope.{name}={shown(value)} has no effect with model.rope.kind={self.kind!r}. Set the kind "
                    f"to one of {list(kinds)}, or leave {name} out."
                )
        if self.kind in ("dynamic", "yarn", "longrope", "llama3") and self.original_max_positions < 2:
            raise ConfigError(
                f"model.rope.kind={self.kind!r} with model.rope.original_max_positions={self.original_max_positions}: "
                "it needs the model's original training length, such as 4096."
            )
        if self.query_growth and self.partial != 1:
            raise ConfigError(
                f"model.rope.query_growth={self.query_growth} scales full queries, but model.rope.partial="
                f"{self.partial} rotates only some channels. Use model.rope.partial=1."
            )
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"model.rope.high_freq_factor={self.high_freq_factor} must be above "
                f"model.rope.low_freq_factor={self.low_freq_factor}; Llama 3.1 has 4 and 1."
            )

    def _check_numbers(self) -> None:
        """Raise ConfigError for numbers out of range, for any kind."""
        if not 1 < self.theta < math.inf:
            raise ConfigError(f"model.rope.theta={self.theta} must be a number above 1, such as 10000.")
        if not 1 <= self.factor < math.inf:
            raise ConfigError(
                f"model.rope.factor={self.factor} must be at least 1: it is the context extension factor."
            )
        for name in ("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"model.rope.{name}={getattr(self, name)} must be a positive number.")
        if not 0 < self.partial <= 1:
            raise ConfigError(f"model.rope.partial={self.partial} must be above 0 and at most 1.")
        for name in ("attention_factor", "mscale", "mscale_all_dim", "query_growth", "original_max_positions"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"model.rope.{name}={getattr(self, name)} must not be negative; 0 means unset.")
        for name, most in _UPPER_BOUNDS.items():
            if getattr(self, name) > most:
                raise ConfigError(f"model.rope.{name}={shown(getattr(self, name))} must be at most {most:g}.")

    def _check_yarn(self) -> None:
        """Raise ConfigError if yarn's numbers contradict each other."""
        if self.beta_fast < self.beta_slow:
            raise ConfigError(
                f"model.rope.beta_fast={self.beta_fast} must not be below model.rope.beta_slow={self.beta_slow}: "
                "channel pairs between the two are partly interpolated. The paper has 32 and 1."
            )
        if self.original_max_positions < 2 * math.pi * self.beta_slow:
            raise ConfigError(
                f"model.rope.original_max_positions={self.original_max_positions} is too short for "
                f"model.rope.beta_slow={self.beta_slow}: even the fastest channel pair rotates less often. "
                f"Try original_max_positions={math.ceil(2 * math.pi * self.beta_slow)} or more."
            )
        if self.mscale not in (0, 1) and not self.mscale_all_dim:
            raise ConfigError(
                f"model.rope.mscale={self.mscale} has no effect without model.rope.mscale_all_dim. Set both (as in "
                "DeepSeek), or set model.rope.attention_factor instead."
            )

    def _yarn_frequencies(self, base: list[float], rotary_size: int) -> list[float]:
        """Keep fast channel pairs, divide slow ones by ``factor``, and blend in between (YaRN, section 3.2)."""

        def pair_of(rotations: float) -> float:
            """Return the (fractional) pair that completes ``rotations`` rotations in the original length."""
            # Solve rotations · 2π = original length · theta^(-2c / rotary_size) for c.
            wavelength = self.original_max_positions / (rotations * 2 * math.pi)
            return rotary_size * math.log(wavelength) / (2 * math.log(self.theta))

        # Pairs below ``low`` rotate often enough to see every angle in training; those above ``high`` do not.
        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_size - 1)
        # As in transformers: avoid a zero width if both bounds coincide.
        width = high - low or 0.001
        divided = [min(max((c - low) / width, 0.0), 1.0) for c in range(len(base))]
        return [f * (1 - share) + f / self.factor * share for f, share in zip(base, divided, strict=True)]

    def _llama3_frequency(self, frequency: float) -> float:
        """Keep a fast pair's frequency, divide a slow one's by ``factor``, and blend in between."""
        rotations = self.original_max_positions * frequency / (2 * math.pi)
        if rotations < self.low_freq_factor:
            return frequency / self.factor
        if rotations > self.high_freq_factor:
            return frequency
        share = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - share) * frequency / self.factor + share * frequency


_DEFAULTS = {f.name: f.default for f in fields(Rope)}


def _mscale(factor: float, weight: float) -> float:
    """Return YaRN's attention scale: 0.1 · weight · ln(factor) + 1."""
    if factor <= 1:
        return 1.0
    return 0.1 * weight * math.log(factor) + 1.0
