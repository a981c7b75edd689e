"""Next-token prediction, the training objective of decoders."""

from __future__ import annotations

from dataclasses import replace

from longctx.batch import Batch, Stream, next_tokens
from longctx.objectives.token_prediction import TokenPrediction


class CausalLM(TokenPrediction):
    """Next-token prediction within documents; with multi-token prediction also of the tokens after the next."""

    def prepare(self, stream: Stream) -> Batch:
        batch = next_tokens(stream)
        if self.network.config.mtp_layers:
            # Targets that do not count are still read.
            batch = replace(batch, following=stream.following)
        return batch
