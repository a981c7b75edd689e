"""What ``train.chunk_tokens = "auto"`` chooses from."""

from __future__ import annotations

from launcher.config.kept import check_kept
from launcher.config.sections import LEAST_CHUNK, RunConfig
from launcher.config.side_by_side import C, padded_tokens
from longctx.errors import ConfigError

_CHUNKS = (16384, 8192, 4096, 2048, LEAST_CHUNK)
_MORE_GROUPS = (1, 2, 4, 8, 16)
"""Times those that the config asks for."""


def chunk_choices(config: C) -> list[C]:
    """What "auto" chooses from, the fastest and largest first: whole rows, then chunks, each with few groups of heads.

    Of chunks as long as a rank's tokens none but the least. ConfigError where nothing goes with the other settings.
    """
    tokens = padded_tokens(config, config.data.seq_len * config.train.micro_batch_rows) // config.parallel.context
    chunks = [n for n in _CHUNKS if n < tokens] or [LEAST_CHUNK]
    groups = [n * config.train.head_groups for n in _MORE_GROUPS]
    by_chunks = [config.with_chunks(n, num_groups) for n in chunks for num_groups in groups]
    found = [choice for choice in (config.with_chunks(0), *by_chunks) if _goes(choice)]
    if not found:
        check_kept(by_chunks[0])
    return found


def _goes(config: RunConfig) -> bool:
    try:
        check_kept(config)
    except ConfigError:
        return False
    return True
