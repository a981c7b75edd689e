"""The supervised training command: its script, its run, and the same command line for another attempt."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from launcher.cluster.hostfile import FILTERS, flag_value
from launcher.cluster.launch_commands import SCRIPT
from launcher.config.flags import take_flag
from longctx.errors import ConfigError

_TRAIN_COMMANDS, _MODULE = ("train", "pretrain"), "launcher.pretrain"
_HOSTFILE = ("--hostfile", "-H")
_DEEPSPEED, _NO_LOCAL_RANK = "deepspeed", "--no_local_rank"


@dataclass(frozen=True)
class TrainingCommand:
    """A command line that starts ``launcher/pretrain.py`` by any launcher, or is ``longctx train``."""

    launch_words: tuple[str, ...]
    """Everything up to the script, with it; of ``longctx train`` its verb, and the options that are no settings."""
    arguments: tuple[str, ...]
    """The settings."""

    @classmethod
    def of(cls, words: Sequence[str]) -> TrainingCommand:
        """Parse a command; raise ConfigError unless it trains: other programs do not go on from their checkpoints."""
        for number, word in enumerate(words):
            # Compare the last two parts of the path, since it may be started from any folder.
            is_module = word == _MODULE and words[number - 1] == "-m"
            if is_module or PurePath(word).parts[-2:] == PurePath(SCRIPT).parts:
                return cls(tuple(words[: number + 1]), tuple(words[number + 1 :]))
            # In our own command, --ranks and --hostfile belong to the starter; all other flags are settings.
            if word in _TRAIN_COMMANDS and _is_ours(words[:number]):
                launch_words, arguments = list(words[: number + 1]), list(words[number + 1 :])
                for flag in ("--ranks", "--hostfile"):
                    arguments, value = take_flag(arguments, flag)
                    launch_words += [flag, value] if value is not None else []
                return cls(tuple(launch_words), tuple(arguments))
        problem = "needs the command to start, after --."
        if words:
            given = shlex.join(words)[:200]
            problem = (
                f"`{given}` is not a training command: other programs are not known to resume from their checkpoints."
            )
        raise ConfigError(f"longctx run: {problem}\nTry: longctx run -- longctx train --config run.toml")

    @property
    def words(self) -> list[str]:
        """The full command line."""
        return [*self.launch_words, *self.arguments]

    @property
    def started(self) -> list[str]:
        """Command line to start, with the same arguments on all ranks.

        If a rank fails, DeepSpeed's launcher prints its last rank's arguments, so ``--local_rank``, which our script
        does not read, is left out.
        """
        if PurePath(self.launch_words[0]).name != _DEEPSPEED or _NO_LOCAL_RANK in self.launch_words:
            return self.words
        return [self.launch_words[0], _NO_LOCAL_RANK, *self.words[1:]]

    @property
    def resume(self) -> str | None:
        """Value of ``--run.resume``; None if it is not given."""
        return take_flag(list(self.arguments), "--run.resume")[1]

    @property
    def hostfile(self) -> Path | None:
        """Hostfile among the starter's flags; None if unset, or if a filter selects hosts from it."""
        if any(word.partition("=")[0] in FILTERS for word in self.launch_words):
            return None
        value = flag_value(self.launch_words, _HOSTFILE)
        return None if value is None else Path(value)

    def resuming(self, resume: str | None) -> TrainingCommand:
        """Return the command with another ``--run.resume``, or without it."""
        # Replace an earlier value: the restart's resume point takes precedence over the user's.
        arguments, _ = take_flag(list(self.arguments), "--run.resume")
        if resume is not None:
            arguments += ["--run.resume", resume]
        return replace(self, arguments=tuple(arguments))

    def on_hosts(self, hostfile: Path) -> TrainingCommand:
        """Return the command on the hosts of another file."""
        launch_words: list[str] = []
        words = iter(self.launch_words)
        for word in words:
            flag, equals, _ = word.partition("=")
            if flag not in _HOSTFILE:
                launch_words.append(word)
                continue
            # The file is a separate word, or part of the flag's word.
            if not equals:
                next(words, None)
            launch_words += ["--hostfile", str(hostfile)]
        return replace(self, launch_words=tuple(launch_words))

    def __str__(self) -> str:
        """Return the command as it is typed."""
        return shlex.join(self.words)


def _is_ours(words: Sequence[str]) -> bool:
    """Return whether these words call our own program: ``longctx``, by any path, or ``python -m launcher``."""
    return tuple(words[-2:]) == ("-m", "launcher") or any(PurePath(word).name == "longctx" for word in words[-1:])
