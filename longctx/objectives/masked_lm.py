"""Masked tokens (BERT, arXiv 1810.04805 §3.1), the training objective for encoders."""

from __future__ import annotations

from dataclasses import replace

from longctx.batch import IGNORED_TARGET, Batch, Stream, with_targets
from longctx.errors import ConfigError
from longctx.kernels.devices import on_cpu
from longctx.objectives.token_prediction import TokenPrediction


class MaskedLM(TokenPrediction):
    """Predict the original tokens at masked positions; all other tokens have no target.

    Mask choice and replacements come with the data (``data_pipeline/rows/token_masking.py``).
    """

    def prepare(self, stream: Stream) -> Batch:
        if stream.masked is None:
            raise ConfigError("train.objective=masked needs masked data; this data was read without a MaskRule.")
        masked_indices = stream.masked_indices
        # only on a CPU: other devices would need a host sync
        if masked_indices is None and on_cpu(stream.masked):
            masked_indices = (stream.masked.flatten() != IGNORED_TARGET).nonzero().flatten()
        return replace(with_targets(stream, stream.masked), masked_indices=masked_indices)
