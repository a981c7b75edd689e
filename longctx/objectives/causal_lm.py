"""Next-token prediction: what decoders are trained on."""

from __future__ import annotations

from dataclasses import replace

from longctx.batch import Batch, Stream, next_tokens
from longctx.objectives.token_prediction import TokenPrediction


class CausalLM(TokenPrediction):
    """A token's target is the one that follows in its document, and with multi-token prediction those behind it."""

    def prepare(self, stream: Stream) -> Batch:
        batch = next_tokens(stream)
        if self.network.config.mtp_layers:
            # Which of them count is another matter than which of them are read.
            batch = replace(batch, following=stream.following)
        return batch
