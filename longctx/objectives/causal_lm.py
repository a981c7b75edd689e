"""Next-token prediction, the training objective for decoders."""

from __future__ import annotations

from dataclasses import replace

from longctx.batch import Batch, Stream, next_tokens
from longctx.objectives.token_prediction import TokenPrediction


class CausalLM(TokenPrediction):
    """Next-token prediction within documents; multi-token prediction adds tokens further ahead."""

    def prepare(self, stream: Stream) -> Batch:
        batch = next_tokens(stream)
        if self.network.config.mtp_layers:
            # with_targets drops ``next_token_ids``, but MTP blocks read these tokens even if their loss is masked out
            batch = replace(batch, next_token_ids=stream.next_token_ids)
        return batch
