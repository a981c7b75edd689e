"""The model and its uses: decoder, kernels, objectives, conversion, generation.

This package handles tensors, not processes: it never imports ``torch.distributed``, ``parallel`` or ``launcher``.
"""

__version__ = "0.1.0"
