"""Next-token prediction: what decoders are trained on."""

from __future__ import annotations

from longctx.batch import Batch, Stream, next_tokens
from longctx.objectives.token_prediction import TokenPrediction


class CausalLM(TokenPrediction):
    """A token's target is the one that follows in its document."""

    def prepare(self, stream: Stream) -> Batch:
        return next_tokens(stream)
