"""The model and what is done with it: decoder, kernels, objectives, conversion, generation.

Knows tensors, not processes: nothing in here imports ``torch.distributed``, ``parallel`` or ``launcher``.
"""

__version__ = "0.1.0"
