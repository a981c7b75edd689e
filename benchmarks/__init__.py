"""Measurements compared with a limit or a peer in one process. ``python -m benchmarks`` (``make bench``) starts all."""

import os

# Spinning threads would count as work in CPU seconds; OpenMP reads this when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
