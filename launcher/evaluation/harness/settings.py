"""Settings for one of our models from lm-eval's ``--model_args``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from launcher.evaluation.model_source import check_positions
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.generation.prefill import CHUNK_TOKENS, check_chunk_tokens

_KINDS = {"Path": str, "Path | None": str, "str": str, "int": int, "bool": bool, "bool | None": bool}
"""Python type that lm-eval converts ``name=TEXT`` to, by the field's type."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings for the model and its execution, equal on every rank."""

    checkpoint: Path
    """Checkpoint, run folder (its newest checkpoint), or Hugging Face folder."""
    tokenizer: Path | None = None
    """Tokenizer for a folder without its own."""
    dtype: str = "float32"
    """Dtype for weights and computation: float32 or bfloat16."""
    context: int = 0
    """Ranks that share a text; 0 uses all."""
    expert: int = 1
    """Ranks that share the experts."""
    chunk_tokens: int = CHUNK_TOKENS
    """Tokens per forward pass; short texts are packed up to this number."""
    max_length: int = 0
    """Maximum tokens per text; 0 uses the model's positions."""
    beyond_positions: bool = False
    """Allow a ``max_length`` greater than the model's positions."""
    seed: int = 1234
    """Base seed for sampling: the n-th sampled text uses seed + n."""
    enable_thinking: bool | None = None
    """Chat template variable: false, or unset to use the template's default."""

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype={self.dtype}: use float32 or bfloat16.")
        if self.max_length < 0:
            raise ConfigError(f"max_length={self.max_length} must not be negative; 0 means the model's positions.")
        if self.enable_thinking:
            raise ConfigError(
                "enable_thinking=true: replies would be scored with their thinking, which longctx does not strip. "
                "Use enable_thinking=false, or export the model (`convert --to hf`) and use --model hf."
            )
        check_chunk_tokens(self.chunk_tokens)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Settings:
        """Parse ``--model_args``; raise ConfigError for an unknown name or a value with the wrong type."""
        known = {field.name: field for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in arguments.items():
            if name not in known:
                raise ConfigError(_unknown_name_message(name, list(known)))
            if value is None:
                continue
            wanted = _KINDS[str(known[name].type)]
            # A folder may be named 2024, which lm-eval converts to a number.
            if wanted is str and isinstance(value, (int, float, Path)) and not isinstance(value, bool):
                value = str(value)
            # type(), not isinstance(): True must not pass as an integer.
            if type(value) is not wanted:
                raise ConfigError(f"--model_args {name}={value}: give {_describe_type(wanted)}.")
            values[name] = value
            if "Path" in str(known[name].type):
                values[name] = Path(str(value))
        missing = [name for name, field in known.items() if field.default is MISSING and name not in values]
        if missing:
            raise ConfigError("--model_args names no checkpoint. Write --model_args checkpoint=RUN_OR_HF_FOLDER")
        return cls(**values)

    def chat_options(self) -> dict[str, bool]:
        """Return variables for the chat template."""
        if self.enable_thinking is None:
            return {}
        return {"enable_thinking": self.enable_thinking}

    def limit(self, model: ModelConfig) -> int:
        """Return the maximum tokens per text; raise ConfigError if the model has fewer positions than requested."""
        check_positions(
            model,
            self.max_length,
            request=f"max_length={self.max_length}",
            hint=f"Use max_length={model.max_positions} or less",
            allow_longer=self.beyond_positions,
            option="add beyond_positions=true",
        )
        return self.max_length or model.max_positions


def parse_device(device: str | None) -> str:
    """Convert lm-eval's ``--device``; raise ConfigError for a device that longctx does not support."""
    # Drop the index: each rank uses the GPU with its own index.
    kind = (device or "auto").partition(":")[0]
    if kind not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {device}: longctx runs on cpu or cuda. Leave it out to select the available one.")
    return kind


def _unknown_name_message(name: str, known: list[str]) -> str:
    nearest = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"Available: {', '.join(known)}."
    if nearest:
        hint = f"Did you mean {nearest[0]}? {hint}"
    # Users often carry this name over from --model hf.
    if name == "pretrained":
        hint = "Write checkpoint=RUN_OR_HF_FOLDER."
    return f"--model_args {name}= is unknown to longctx. {hint}"


def _describe_type(kind: type) -> str:
    return {str: "a name or path", int: "a whole number", bool: "true or false"}[kind]
