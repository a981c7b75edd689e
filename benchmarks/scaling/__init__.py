"""Modules of ``benchmarks/scale.py``: the cost of each of the host's tasks on one rank of a large job."""
