"""The only interface to DeepSpeed: ZeRO stages 0 to 3 around our module, and its state as ranges of named tensors."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when DeepSpeed is imported; choose_device may have set it
