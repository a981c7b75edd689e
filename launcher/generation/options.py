"""What a user asks of ``generate``, as values; checked by themselves, before any file is opened."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from launcher.evaluation.computation import Computation
from launcher.generation.prompts import PromptSource
from longctx.errors import ConfigError
from longctx.generation.beams import Beams
from longctx.generation.penalties import Penalties
from longctx.generation.sampling import Greedy, Sample
from longctx.generation.stop_strings import check_strings


@dataclass(frozen=True, kw_only=True)
class Options(Computation):
    """One call of ``generate``."""

    checkpoint: Path
    prompts: PromptSource
    max_new_tokens: int
    strategy: Greedy | Sample | Beams = field(default_factory=Greedy)
    penalties: Penalties = field(default_factory=Penalties)
    stops: tuple[str, ...] = ()
    """A text ends before the first of these."""
    max_sequences: int | None = None
    """Prompts of a file that are under way together; None for as many as memory holds, up to a default."""
    output: Path | None = None
    """The file of the result; None for standard output."""
    tokenizer: Path | None = None
    beyond_positions: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_strings(self.stops)
        if self.prompts.system and not self.prompts.chat:
            raise ConfigError("--system is the first turn of a chat: give --chat with it.")
        if self.max_new_tokens < 0:
            raise ConfigError(f"--max-new-tokens {self.max_new_tokens} must not be negative.")
        if not self.has_many and self.max_sequences is not None:
            raise ConfigError("--max-sequences is for --prompts-file: one prompt has no other beside it. Leave it out.")
        if self.max_sequences is not None and isinstance(self.strategy, Beams):
            raise ConfigError("--beams search for one prompt after another: --max-sequences would do nothing.")
        if self.max_sequences is not None and self.max_sequences < 1:
            raise ConfigError(f"--max-sequences {self.max_sequences} must be at least 1.")
        if self.output is not None:
            _check_new_file(self.output)

    @property
    def has_many(self) -> bool:
        """Whether the prompts are those of a file."""
        return self.prompts.lines is not None


def _check_new_file(path: Path) -> None:
    """ConfigError unless a file can be made there."""
    if path.exists():
        raise ConfigError(f"--output {path} is there already. Name another file, or remove it.")
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: the folder {path.parent} does not exist. Make it first.")
