"""DocumentHead: logits for documents, from their first tokens or their means.

Axes: B rows, t tokens of this rank, S sums, F documents, M model width, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from longctx.config import ModelConfig
from longctx.model.chunks.chunked_pool import chunked_pool
from longctx.model.chunks.residual_stream import ResidualStream
from longctx.model.layers.linear import Linear
from longctx.model.token_pool import TokenPool

Pool = Callable[[Tensor], Tensor]
"""Maps all hidden states, or a residual stream's handle, to the documents' hidden states [F, M]."""


class DocumentHead(nn.Module):
    """Logits per document: an optional projection with tanh (BERT's pooler), then a projection to the classes."""

    def __init__(self, width: int, classes: int, *, has_pooler: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.dense: Linear | None = None
        if has_pooler:
            self.dense = Linear(width, width)
        self.out = Linear(width, classes, bias=bias)

    def forward(self, hidden: Tensor, pool: Pool | None = None) -> Tensor:
        """Compute logits [F, C] from hidden states [F, M], or from what ``pool`` makes of ``hidden``.

        Pooling happens in here: by chunks it applies the last norm, which ZeRO-3 gathers for this module.
        """
        if pool is not None:
            hidden = pool(hidden)
        hidden_FM = hidden.to(self.out.weight.dtype)
        if self.dense is not None:
            hidden_FM = self.dense(hidden_FM).tanh()
        return self.out(hidden_FM)


def build_pair_head(config: ModelConfig) -> DocumentHead | None:
    """Build the head for two segments (BERT's pooler and classifier); None if the model has none.

    Its classes are "the segments belong together as they are" and "they do not", ordered like BERT's and ALBERT's
    labels 0 and 1.
    """
    if config.pair_head == "none":
        return None
    return DocumentHead(config.hidden_size, 2, has_pooler=True)


def build_class_head(config: ModelConfig) -> DocumentHead | None:
    """Build the head for an image's class; None if the model has none."""
    if not config.classes:
        return None
    return DocumentHead(config.output_width, config.classes, bias=config.class_bias)


def document_pool(
    pool: TokenPool,
    of_documents: Pool | None = None,
    *,
    stream: ResidualStream | None = None,
    norm: nn.Module | None = None,
) -> Pool:
    """Return the function for ``DocumentHead.forward``.

    ``of_documents`` maps this rank's sums [S, M] to the documents' hidden states [F, M]; by default they are equal.
    With a ``stream`` the function takes its handle, and applies the last ``norm``.
    """
    of_tokens: Pool = pool.apply
    if stream is not None:
        of_tokens = partial(chunked_pool, stream, norm, pool)
    if of_documents is None:
        return of_tokens
    return lambda hidden: of_documents(of_tokens(hidden))
