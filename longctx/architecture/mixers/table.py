"""The kinds of layers that a config names (``model.layers``), and the mixer that each is."""

from __future__ import annotations

from collections.abc import Callable

from longctx.architecture.fields import ModelFields
from longctx.architecture.mixers.latent import Latent
from longctx.architecture.mixers.linear import Linear
from longctx.architecture.mixers.mixer import Mixer
from longctx.architecture.mixers.softmax import Softmax


def _scores(config: ModelFields) -> type[Softmax]:
    """The mixer of layers with softmax: latent or not, which is the same in all of a model's layers."""
    if config.is_latent:
        return Latent
    return Softmax


MIXERS: dict[str, Callable[[ModelFields], Mixer]] = {
    "full": lambda config: _scores(config)(),
    "window": lambda config: _scores(config)(window=config.window),
    "sparse": lambda config: _scores(config)(window=config.window, stride=config.sparse_stride),
    "linear": lambda config: Linear(),
}
"""What a layer sees of its document, and by what."""
