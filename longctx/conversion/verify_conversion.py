"""Conversion checks: every tensor's hash, read back through the table, and logits compared with transformers.

Axes: T tokens, S source tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor

from longctx.architecture.layer_specs import mixers_of
from longctx.architecture.size import widest_ffn
from longctx.batch import PackedDocuments, Stream
from longctx.config import ModelConfig
from longctx.conversion.casts import dtype_name
from longctx.conversion.reference_model import load_reference, quiet_transformers, switch_attention
from longctx.conversion.tensor_mismatches import format_names
from longctx.conversion.verify_images import RandomImages, our_image_outputs, reference_image_outputs
from longctx.conversion.weights.json_files import read_checkpoint_json
from longctx.errors import CheckpointError, ConfigError
from longctx.families import auto_class
from longctx.kernels.memory import available_bytes
from longctx.tensor_bytes import content_of

if TYPE_CHECKING:
    from longctx.model.decoder import Decoder

NUM_TOKENS = 256
"""Input tokens for the logit comparison."""
MAX_LOGIT_ERROR = 1e-5
"""Bound on the largest logit difference in float32; other summation orders stay well below it."""
MAX_KL = 1e-10
"""Bound on a token's KL divergence, in nats. A wrong RoPE permutation gives 1e-5, with a cosine above 0.99."""
VARIANT_FACTOR = 4
"""If transformers' own variants differ by more than a quarter of a bound, as in large models or with large logits, the
bound is this multiple of their difference."""
TWO_ATTENTIONS = "eager and sdpa"
TWO_POSITIONS = "positions from 0 and from 1"
"""Rotary attention depends only on position differences. transformers rounds each angle to float32, in both attentions;
ours are exact, so this rounding only shows between two first positions."""
TWO_PASSES = "one pass and two"
"""Compared instead of two attentions in a model that has only one (Gemma 2, GPT-OSS), and in addition to them if layers
pass states on, which both attentions round the same way."""
_LENGTH_DEPENDENT_KINDS = ("dynamic", "longrope")
_PASSES_FACTOR = 4
"""In models with both, the two attentions differ 2 to 5 times as much as one pass and two."""

Fingerprint = tuple[str, tuple[int, ...], str]
"""A tensor's dtype, shape and hash."""


@dataclass(frozen=True, kw_only=True)
class TensorCheck:
    """Tensors that were read back and match."""

    num_tensors: int
    num_bytes: int


class Fingerprints:
    """Hashes for every parameter that a conversion passes to its writer, to compare with the written ones."""

    def __init__(self) -> None:
        self._recorded: dict[str, Fingerprint] = {}
        self._num_bytes = 0

    def record(self, items: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the items, recording each one first."""
        for name, tensor in items:
            self._recorded[name] = _fingerprint(tensor)
            self._num_bytes += tensor.nbytes
            yield name, tensor

    def check(self, tensors: Iterable[tuple[str, Tensor]], location: str) -> TensorCheck:
        """Raise CheckpointError unless ``tensors`` equals the recorded parameters: names, dtypes, shapes, bytes."""
        remaining = dict(self._recorded)
        mismatches: list[str] = []
        for name, tensor in tensors:
            expected = remaining.pop(name, None)
            read_back = _fingerprint(tensor)
            if read_back != expected:
                mismatches.append(f"{name} ({_describe_mismatch(expected, read_back)})")
        mismatches += [f"{name} (missing)" for name in remaining]
        if mismatches:
            raise CheckpointError(
                f"{location} does not match the converted model; {len(mismatches)} tensors differ: "
                f"{format_names(mismatches, limit=6)}."
            )
        return TensorCheck(num_tensors=len(self._recorded), num_bytes=self._num_bytes)


def _fingerprint(tensor: Tensor) -> Fingerprint:
    """Return a tensor's dtype, shape and content hash."""
    return dtype_name(tensor.dtype), tuple(tensor.shape), xxhash.xxh3_128_hexdigest(content_of(tensor))


def _describe_mismatch(expected: Fingerprint | None, actual: Fingerprint) -> str:
    """Describe the difference between two fingerprints, for the message."""
    if expected is None:
        return "unexpected"
    if expected[:2] != actual[:2]:
        return f"{actual[0]} {actual[1]} instead of {expected[0]} {expected[1]}"
    return "other bytes"


@dataclass(frozen=True, kw_only=True)
class LogitsCheck:
    """Distance between our logits and transformers', with its bounds."""

    inputs: str
    """Number and kind of the inputs."""
    outputs: str = "logits"
    """Outputs that were compared; a model without a head has hidden states."""
    dtype: torch.dtype
    """Dtype in which both were computed."""
    max_error: float
    max_kl: float
    variant_error: float
    """Largest logit difference between two variants in transformers."""
    variants: str
    """The two variants: ``TWO_ATTENTIONS``, ``TWO_POSITIONS`` or ``TWO_PASSES``, whichever differ most."""
    error_bound: float
    kl_bound: float

    @property
    def passed(self) -> bool:
        """True if both distances are within their bounds; NaN fails."""
        return self.max_error <= self.error_bound and self.max_kl <= self.kl_bound

    def __str__(self) -> str:
        return (
            f"{self.inputs} in {dtype_name(self.dtype)}: "
            f"{self.outputs} at most {self.max_error:.1e} apart (allowed {self.error_bound:.1e}), "
            f"KL at most {self.max_kl:.1e} nats each (allowed {self.kl_bound:.1e}); "
            f"transformers' {self.variants} are {self.variant_error:.1e} apart"
        )


def logits_skip_reason(config: ModelConfig, num_parameters: int, dtype: torch.dtype) -> str | None:
    """Return the reason if logits cannot be compared, because a model does not fit into memory."""
    need = bytes_needed(config, num_parameters, dtype)
    free = available_bytes()
    if need > free:
        return f"a model of {num_parameters:,} parameters needs {need / 2**30:.1f} GiB, but {free / 2**30:.1f} are free"
    return None


def transformers_supports(model_type: str) -> bool:
    """Return True if the installed transformers has this model type."""
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def compare_logits(
    config: ModelConfig,
    parameters: Callable[[], Iterable[tuple[str, Tensor]]],
    folder: Path,
    *,
    num_parameters: int,
    dtype: torch.dtype,
) -> LogitsCheck:
    """Compare the decoder's logits, with ``parameters``, to those from ``folder`` loaded by transformers.

    Both get the same random tokens at positions 0, 1, 2, … and compute in float32 if that fits (weights stored in
    ``dtype`` keep their value), otherwise in ``dtype``. One model is in memory at a time. Raise CheckpointError above
    the bounds ``MAX_LOGIT_ERROR`` and ``MAX_KL``, which grow if transformers' own variants differ more
    (``VARIANT_FACTOR``).
    """
    # In float32 a difference is an error in the model; in bfloat16 it may be rounding.
    compute = dtype
    if logits_skip_reason(config, num_parameters, torch.float32) is None:
        compute = torch.float32
    loaded_by = auto_class(read_checkpoint_json(folder / "config.json"))
    if config.image.patch or config.classes:
        check = _compare_images(config, parameters(), folder, compute, loaded_by)
    else:
        check = _compare_tokens(config, parameters(), folder, compute, loaded_by)
    if not check.passed:
        raise CheckpointError(f"the decoder and transformers disagree.\n{check}.")
    return check


def _compare_images(
    config: ModelConfig, parameters: Iterable[tuple[str, Tensor]], folder: Path, dtype: torch.dtype, loaded_by: str
) -> LogitsCheck:
    """Compare outputs for random images."""
    images = RandomImages.of(config, NUM_TOKENS)
    pair = reference_image_outputs(folder, images, dtype, auto_class=loaded_by)
    # Second, so that only one model is in memory at a time.
    ours = our_image_outputs(_filled_decoder(config, parameters, dtype), images)
    outputs = "logits" if config.classes else "hidden states"
    return check_logits(ours, {TWO_ATTENTIONS: pair}, dtype=dtype, inputs=images.describe(), outputs=outputs)


def _compare_tokens(
    config: ModelConfig, parameters: Iterable[tuple[str, Tensor]], folder: Path, dtype: torch.dtype, loaded_by: str
) -> LogitsCheck:
    """Compare next-token logits for random tokens."""
    num_tokens = min(NUM_TOKENS, config.max_positions)
    # RoBERTa's class mistakes the id before its first position for padding.
    first, generator = min(config.position_offset, config.vocab_size - 1), torch.Generator().manual_seed(0)
    tokens_T = torch.randint(first, config.vocab_size, (num_tokens,), generator=generator)
    source_S: Tensor | None = None
    if config.encoder_layers:
        source_S = torch.randint(first, config.vocab_size, (num_tokens,), generator=generator)
    is_shift_invariant = config.position == "rope" and config.rope.kind not in _LENGTH_DEPENDENT_KINDS
    has_states = any(mixer.core == "gated_delta" for mixer in mixers_of(config))
    reference_pairs = _transformers_logits(
        folder,
        tokens_T,
        source_S,
        dtype,
        auto_class=loaded_by,
        is_shift_invariant=is_shift_invariant,
        has_states=has_states,
    )
    # Second, so that only one model is in memory at a time.
    ours_TV = _our_logits(_filled_decoder(config, parameters, dtype), tokens_T, source_S)
    return check_logits(ours_TV, reference_pairs, dtype=dtype)


def check_logits(
    ours_TV: Tensor,
    reference_pairs: dict[str, tuple[Tensor, Tensor]],
    *,
    dtype: torch.dtype,
    inputs: str = "",
    outputs: str = "logits",
) -> LogitsCheck:
    """Compare our logits with the reference, the first in each pair; the pairs set the bounds.

    ``inputs`` (default: the number of tokens) and ``outputs`` are for the description.
    """
    (reference_TV, _), *_ = reference_pairs.values()
    error, kl = logit_distance(reference_TV, ours_TV)
    variant_errors = {ways: logit_distance(*pair) for ways, pair in reference_pairs.items()}
    farthest = max(variant_errors, key=lambda ways: variant_errors[ways][0])
    factors = {ways: VARIANT_FACTOR * (_PASSES_FACTOR if ways == TWO_PASSES else 1) for ways in variant_errors}
    return LogitsCheck(
        inputs=inputs or f"{len(ours_TV)} tokens",
        outputs=outputs,
        dtype=dtype,
        max_error=error,
        max_kl=kl,
        variant_error=variant_errors[farthest][0],
        variants=farthest,
        error_bound=max(
            MAX_LOGIT_ERROR, *(factors[ways] * own_error for ways, (own_error, _) in variant_errors.items())
        ),
        # KL grows with the square of the difference.
        kl_bound=max(MAX_KL, *(factors[ways] ** 2 * own_kl for ways, (_, own_kl) in variant_errors.items())),
    )


def logit_distance(p_TV: Tensor, q_TV: Tensor, block: int = 32) -> tuple[float, float]:
    """Return the largest logit difference and the largest per-token KL(p ‖ q) in nats, both in float64."""
    errors, divergences = [], []
    # In token ranges: float64 logits for all tokens would take more memory than the model.
    for p, q in zip(p_TV.split(block), q_TV.split(block), strict=True):
        p, q = p.double(), q.double()
        errors.append((p - q).abs().max())
        log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
        divergences.append((log_p.exp() * (log_p - log_q)).sum(-1).max())
    return float(torch.stack(errors).max()), float(torch.stack(divergences).max())


@torch.no_grad()
def _filled_decoder(config: ModelConfig, parameters: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Decoder:
    """Return the decoder with these parameters, for evaluation."""
    from longctx.model.decoder import Decoder

    model = Decoder(config, seed=None).to(dtype).eval()
    # These tensors share memory with the model: copying into them fills it.
    own = model.state_dict()
    # One parameter at a time, directly into the model: the checkpoint is never in memory as well.
    for name, tensor in parameters:
        own.pop(name).copy_(tensor)
    if own:
        raise CheckpointError(f"parameters are missing: {format_names(own)}.")
    return model


@torch.no_grad()
def _our_logits(model: Decoder, tokens_T: Tensor, source_S: Tensor | None) -> Tensor:
    """Compute our logits [T, V] in float32, for one document without padding; an encoder reads the source."""
    positions_BT, source = torch.arange(len(tokens_T))[None], None
    if source_S is not None:
        documents = PackedDocuments((0, len(source_S)))
        source = model.encode(
            Stream(
                tokens=source_S[None],
                positions=torch.arange(len(source_S))[None],
                document_ids=torch.zeros_like(source_S)[None],
                documents=documents,
            )
        )
    return model.logits(model(tokens_T[None], positions_BT, source=source))[0].float()


@torch.no_grad()
def _transformers_logits(
    folder: Path,
    tokens_T: Tensor,
    source_S: Tensor | None,
    dtype: torch.dtype,
    *,
    auto_class: str,
    is_shift_invariant: bool,
    has_states: bool,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Compute transformers' logits [T, V] in two variants per pair; execute no code from the folder.

    ``auto_class`` loads the model; ``is_shift_invariant`` means that results do not depend on the first position,
    ``has_states`` that layers pass states on.
    """
    with quiet_transformers():
        model = load_reference(folder, dtype, auto_class=auto_class)
        tokens_BT = tokens_T[None]
        # Odd, so that kernels split the second pass's sums differently.
        cut = len(tokens_T) * 2 // 5 | 1
        call = partial(model, tokens_BT)
        if source_S is not None:
            call = partial(model, source_S[None], decoder_input_ids=tokens_BT)
        eager = call()
        eager_TV = eager.logits[0].float()
        # GPT-1 has neither another attention nor a cache: its pair has no difference.
        if not switch_attention(model) and _cache_name(eager) is not None:
            return {TWO_PASSES: (eager_TV, _in_two_passes(model, tokens_BT, cut))}
        reference_TV = call().logits[0].float()
        pairs = {TWO_ATTENTIONS: (reference_TV, eager_TV)}
        if has_states:
            pairs[TWO_PASSES] = (reference_TV, _in_two_passes(model, tokens_BT, cut))
        if is_shift_invariant:
            # A shift by one changes every angle but no position difference.
            positions_BT = torch.arange(1, len(tokens_T) + 1)[None]
            shifted_TV = model(tokens_BT, position_ids=positions_BT).logits[0].float()
            pairs[TWO_POSITIONS] = (reference_TV, shifted_TV)
        return pairs


def _cache_name(output: Any) -> str | None:
    """Return the name for the cache in transformers' output, which depends on the version; None if it has none."""
    return next((name for name in ("cache", "past_key_values") if name in output), None)


def _in_two_passes(model: Any, tokens_BT: Tensor, cut: int) -> Tensor:
    """Compute transformers' logits [T, V] with tokens from ``cut`` on reading a cache of earlier ones."""
    first = model(tokens_BT[:, :cut], use_cache=True)
    name = _cache_name(first)
    assert name is not None, f"{type(model).__name__} returns no cache"
    second = model(tokens_BT[:, cut:], **{name: first[name]}, use_cache=True)
    return torch.cat([first.logits, second.logits], dim=1)[0].float()


def bytes_needed(config: ModelConfig, num_parameters: int, dtype: torch.dtype) -> int:
    """Return the bytes for one model, three float32 copies of the logits, some rows in float64, and activations."""
    tokens = min(NUM_TOKENS, config.max_positions)
    # Activations per token: residual stream, eager attention scores, and the widest FFN.
    width = 8 * config.hidden_size + 4 * config.num_heads * tokens + 4 * widest_ffn(config)
    return int(1.1 * num_parameters * dtype.itemsize) + tokens * (16 * config.head_rows + 4 * width) + 2**28


def check_verify_mode(verify: str) -> None:
    """Raise ConfigError unless ``verify`` is one of ``VERIFY_MODES``."""
    if verify not in VERIFY_MODES:
        raise ConfigError(f"verify={verify!r} is not one of {', '.join(VERIFY_MODES)}.")


VERIFY_MODES = ("auto", "tensors", "logits", "none")
"""``logits`` also checks tensors; ``auto`` selects ``logits`` if they can be compared, otherwise ``tensors``."""
