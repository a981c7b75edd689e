"""CUDA code on fake tensors, in processes of their own."""

import sys


def say(*words: object) -> None:
    """Write a line for the test that started this process."""
    sys.stdout.write(" ".join(str(word) for word in words) + "\n")
