"""Verification of a conversion: every tensor's hash read back through the table, and logits compared with transformers.

Axes: T tokens, S tokens of a source, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from longctx.architecture.layers import mixers_of
from longctx.architecture.size import widest_ffn
from longctx.batch import PackedDocuments, Stream
from longctx.config import ModelConfig
from longctx.conversion.casts import dtype_name
from longctx.conversion.differences import listing
from longctx.conversion.weights.json_files import read_json
from longctx.errors import CheckpointError, ConfigError
from longctx.families import auto_class
from longctx.kernels.memory import available_bytes
from longctx.tensor_bytes import content_of

NUM_TOKENS = 256
"""Tokens of the input that logits are compared on."""
MAX_LOGIT_ERROR = 1e-5
"""Bound on the largest difference of two logits in float32: other orders of the same sums stay well below it."""
MAX_KL = 1e-10
"""Bound on a token's KL divergence, in nats. A wrong RoPE permutation gives 1e-5, with a cosine above 0.99."""
OWN_FACTOR = 4
"""Where transformers' own ways to compute differ by more than a quarter of a bound, as they do in models that are large
or have large logits, the bound is this many times their difference."""
TWO_ATTENTIONS = "eager and sdpa"
TWO_POSITIONS = "positions from 0 and from 1"
"""Rotary attention sees differences of positions alone. transformers rounds each angle to float32, in both attentions
alike; ours are exact, so this part of its rounding only shows between two beginnings."""
TWO_PASSES = "one pass and two"
"""Compared instead of two attentions in a model that has only one (Gemma 2, GPT-OSS), and beside them in one whose
layers pass states on, which both attentions round alike."""
_STRETCHED_BY_LENGTH = ("dynamic", "longrope")
_PASSES_FACTOR = 4
"""In models that have both, the two attentions are 2 to 5 times as far apart as one pass and two."""

Fingerprint = tuple[str, tuple[int, ...], str]
"""Dtype, shape and hash of a tensor."""


@dataclass(frozen=True, kw_only=True)
class TensorCheck:
    """Tensors that were read back and found equal."""

    num_tensors: int
    num_bytes: int


class Fingerprints:
    """Hash of every parameter that a conversion passes to its writer, to be compared with the written ones."""

    def __init__(self) -> None:
        self._recorded: dict[str, Fingerprint] = {}
        self._num_bytes = 0

    def record(self, items: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the items, each recorded before it is passed on."""
        for name, tensor in items:
            self._recorded[name] = _fingerprint(tensor)
            self._num_bytes += tensor.nbytes
            yield name, tensor

    def check(self, found: Iterable[tuple[str, Tensor]], where: str) -> TensorCheck:
        """Raise CheckpointError unless ``found`` equals the recorded parameters in names, dtypes, shapes and bytes."""
        left = dict(self._recorded)
        wrong: list[str] = []
        for name, tensor in found:
            expected = left.pop(name, None)
            read_back = _fingerprint(tensor)
            if read_back != expected:
                wrong.append(f"{name} ({_difference(expected, read_back)})")
        wrong += [f"{name} (missing)" for name in left]
        if wrong:
            raise CheckpointError(
                f"{where} does not hold what was converted; {len(wrong)} tensors differ: {listing(wrong, limit=6)}."
            )
        return TensorCheck(num_tensors=len(self._recorded), num_bytes=self._num_bytes)


def _fingerprint(tensor: Tensor) -> Fingerprint:
    """Return the properties that must be equal for two tensors."""
    return dtype_name(tensor.dtype), tuple(tensor.shape), xxhash.xxh3_128_hexdigest(content_of(tensor))


def _difference(expected: Fingerprint | None, found: Fingerprint) -> str:
    """Return the difference of two fingerprints, for the message."""
    if expected is None:
        return "unexpected"
    if expected[:2] != found[:2]:
        return f"{found[0]} {found[1]} instead of {expected[0]} {expected[1]}"
    return "other bytes"


@dataclass(frozen=True, kw_only=True)
class LogitsCheck:
    """Distance of our logits from those of transformers, and its bounds."""

    num_tokens: int
    dtype: torch.dtype
    """Dtype that both computed in."""
    max_error: float
    max_kl: float
    own_error: float
    """Largest difference between transformers' logits of two ways to compute them."""
    ways: str
    """Which two: ``TWO_ATTENTIONS``, ``TWO_POSITIONS`` or ``TWO_PASSES``, whichever are farther apart."""
    error_bound: float
    kl_bound: float

    @property
    def passed(self) -> bool:
        """True if both distances are within their bounds (NaN is not)."""
        return self.max_error <= self.error_bound and self.max_kl <= self.kl_bound

    def __str__(self) -> str:
        return (
            f"{self.num_tokens} tokens in {dtype_name(self.dtype)}: "
            f"logits at most {self.max_error:.1e} apart (allowed {self.error_bound:.1e}), "
            f"KL at most {self.max_kl:.1e} nats a token (allowed {self.kl_bound:.1e}); "
            f"transformers' {self.ways} are {self.own_error:.1e} apart"
        )


def why_no_logits(config: ModelConfig, num_parameters: int, dtype: torch.dtype) -> str | None:
    """Return why logits cannot be compared: a model does not fit. None if they can."""
    need = bytes_needed(config, num_parameters, dtype)
    free = available_bytes()
    if need > free:
        return f"a model of {num_parameters:,} parameters needs {need / 2**30:.1f} GiB, {free / 2**30:.1f} are free"
    return None


def transformers_knows(model_type: str) -> bool:
    """Return whether the installed transformers has this type of model."""
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
    """Compare logits of the decoder with ``parameters`` and of ``folder`` as loaded by transformers.

    Both get the same random tokens at positions 0, 1, 2, … and compute in float32 if that fits (weights stored in
    ``dtype`` keep their value), otherwise in ``dtype``. One model is in memory at a time. Raise CheckpointError if they
    differ by more than the bounds: ``MAX_LOGIT_ERROR`` and ``MAX_KL``, or more if transformers' own implementations are
    far apart (``OWN_FACTOR``).
    """
    # In float32 a difference is an error in the model; in bfloat16 it may be rounding.
    compute = dtype
    if why_no_logits(config, num_parameters, torch.float32) is None:
        compute = torch.float32
    num_tokens = min(NUM_TOKENS, config.max_positions)
    # RoBERTa's class mistakes the id before its first position for padding.
    first, generator = min(config.position_offset, config.vocab_size - 1), torch.Generator().manual_seed(0)
    tokens_T = torch.randint(first, config.vocab_size, (num_tokens,), generator=generator)
    source_S: Tensor | None = None
    if config.encoder_layers:
        source_S = torch.randint(first, config.vocab_size, (num_tokens,), generator=generator)
    moves = config.position == "rope" and config.rope.kind not in _STRETCHED_BY_LENGTH
    loaded_by = auto_class(read_json(folder / "config.json"))
    has_states = any(mixer.core == "gated_delta" for mixer in mixers_of(config))
    theirs = _their_logits(
        folder,
        tokens_T,
        source_S,
        compute,
        auto_class=loaded_by,
        moves=moves,
        has_states=has_states,
    )
    ours_TV = _our_logits(config, parameters(), tokens_T, source_S, compute)
    check = judge_logits(ours_TV, theirs, dtype=compute)
    if not check.passed:
        raise CheckpointError(f"the decoder and transformers disagree.\n{check}.")
    return check


def judge_logits(ours_TV: Tensor, theirs: dict[str, tuple[Tensor, Tensor]], *, dtype: torch.dtype) -> LogitsCheck:
    """Compare our logits with the reference, the first of each pair in ``theirs``; the pairs set the bounds."""
    (reference_TV, _), *_ = theirs.values()
    error, kl = distance(reference_TV, ours_TV)
    own = {ways: distance(*pair) for ways, pair in theirs.items()}
    farthest = max(own, key=lambda ways: own[ways][0])
    factors = {ways: OWN_FACTOR * (_PASSES_FACTOR if ways == TWO_PASSES else 1) for ways in own}
    return LogitsCheck(
        num_tokens=len(ours_TV),
        dtype=dtype,
        max_error=error,
        max_kl=kl,
        own_error=own[farthest][0],
        ways=farthest,
        error_bound=max(MAX_LOGIT_ERROR, *(factors[ways] * own_error for ways, (own_error, _) in own.items())),
        # KL grows with the square of the difference.
        kl_bound=max(MAX_KL, *(factors[ways] ** 2 * own_kl for ways, (_, own_kl) in own.items())),
    )


def distance(p_TV: Tensor, q_TV: Tensor, block: int = 32) -> tuple[float, float]:
    """Return the largest difference of two logits, and the largest KL(p ‖ q) of a token in nats, both in float64."""
    errors, divergences = [], []
    # In blocks: float64 logits of all tokens would take more memory than the model.
    for p, q in zip(p_TV.split(block), q_TV.split(block), strict=True):
        p, q = p.double(), q.double()
        errors.append((p - q).abs().max())
        log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
        divergences.append((log_p.exp() * (log_p - log_q)).sum(-1).max())
    return float(torch.stack(errors).max()), float(torch.stack(divergences).max())


@torch.no_grad()
def _our_logits(
    config: ModelConfig,
    parameters: Iterable[tuple[str, Tensor]],
    tokens_T: Tensor,
    source_S: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return our logits [T, V] in float32, for one document without padding; an encoder reads the source."""
    from longctx.model.decoder import Decoder

    model = Decoder(config, seed=None).to(dtype).eval()
    own = model.state_dict()
    # One parameter at a time, directly into the model: the checkpoint is never in memory as well.
    for name, tensor in parameters:
        own.pop(name).copy_(tensor)
    if own:
        raise CheckpointError(f"nothing was given for {listing(own)}.")
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
def _their_logits(
    folder: Path,
    tokens_T: Tensor,
    source_S: Tensor | None,
    dtype: torch.dtype,
    *,
    auto_class: str,
    moves: bool,
    has_states: bool,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return logits [T, V] computed in two ways, by name of the pair of ways; no code from the folder is executed.

    ``auto_class`` loads it; ``moves`` says that the result does not depend on the first position, ``has_states`` that
    layers pass states on.
    """
    import transformers

    with _silent_transformers():
        try:
            model = (
                getattr(transformers, auto_class)
                .from_pretrained(
                    str(folder),
                    dtype=dtype,
                    local_files_only=True,
                    trust_remote_code=False,
                    attn_implementation="eager",
                )
                .eval()
            )
        except Exception as error:
            # A library with hundreds of models may raise any exception.
            first_line = next(iter(str(error).splitlines()), type(error).__name__)
            raise CheckpointError(f"transformers cannot load {folder}: {first_line}") from error
        tokens_BT = tokens_T[None]
        # Odd, so that the second pass sums in other blocks.
        cut = len(tokens_T) * 2 // 5 | 1
        call = partial(model, tokens_BT)
        if source_S is not None:
            call = partial(model, source_S[None], decoder_input_ids=tokens_BT)
        eager_TV = call().logits[0].float()
        try:
            model.set_attn_implementation("sdpa")
        except (ValueError, ImportError):
            # The model has no other attention implementation.
            return {TWO_PASSES: (eager_TV, _in_two_passes(model, tokens_BT, cut))}
        reference_TV = call().logits[0].float()
        pairs = {TWO_ATTENTIONS: (reference_TV, eager_TV)}
        if has_states:
            pairs[TWO_PASSES] = (reference_TV, _in_two_passes(model, tokens_BT, cut))
        if moves:
            positions_BT = torch.arange(1, len(tokens_T) + 1)[None]
            moved_TV = model(tokens_BT, position_ids=positions_BT).logits[0].float()
            pairs[TWO_POSITIONS] = (reference_TV, moved_TV)
        return pairs


def _in_two_passes(model: Any, tokens_BT: Tensor, cut: int) -> Tensor:
    """Return transformers' logits [T, V] when the tokens from ``cut`` on read a cache of the earlier ones."""
    first = model(tokens_BT[:, :cut], use_cache=True)
    second = model(tokens_BT[:, cut:], past_key_values=first.past_key_values, use_cache=True)
    return torch.cat([first.logits, second.logits], dim=1)[0].float()


@contextmanager
def _silent_transformers() -> Iterator[None]:
    """Suppress progress bars and warnings of transformers within the block."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    had_bar = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bar:
            logging.enable_progress_bar()


def bytes_needed(config: ModelConfig, num_parameters: int, dtype: torch.dtype) -> int:
    """Return the memory of one model, three float32 copies of the logits, some float64 blocks, and activations."""
    tokens = min(NUM_TOKENS, config.max_positions)
    width = 8 * config.hidden_size + 4 * config.num_heads * tokens + 4 * widest_ffn(config)
    return int(1.1 * num_parameters * dtype.itemsize) + tokens * (16 * config.vocab_size + 4 * width) + 2**28


def check_kind(verify: str) -> None:
    """Raise ConfigError unless ``verify`` is one of ``KINDS``."""
    if verify not in KINDS:
        raise ConfigError(f"verify={verify!r} is not one of {', '.join(KINDS)}.")


KINDS = ("auto", "tensors", "logits", "none")
"""``logits`` checks tensors too; ``auto`` is ``logits`` where they can be compared, else ``tensors``."""
