"""The errors a user can cause. Each message says the value, the rule, and the nearest thing that works.

``launcher`` turns any of them into one screen of text and an exit code, the same on every rank; ``assert`` stays for
our own invariants.
"""


class LongCtxError(Exception):
    """Base of every error that is the user's to mend."""


class ConfigError(LongCtxError):
    """A configuration that cannot run: unknown key, wrong type, sizes that do not fit one another."""


class DataError(LongCtxError):
    """A corpus, tokenizer or shard that is missing, unreadable or damaged."""


class CheckpointError(LongCtxError):
    """A checkpoint that is missing, incomplete, damaged or of another model; or one that could not be written."""


class TrainingError(LongCtxError):
    """A step that cannot be taken: numbers that are no numbers any more."""


class ClusterError(LongCtxError):
    """Processes, hosts or launch options that do not fit the run."""
