"""CUDA code on fake tensors, in processes of their own."""
