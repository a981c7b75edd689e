"""The only interface to DeepSpeed: ZeRO stages 0 to 3 around our module; its state as ranges in named tensors."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed reads it at import; choose_device may have set it
