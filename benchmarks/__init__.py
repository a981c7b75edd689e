"""Measurements beside a limit or a peer, in one run. ``python -m benchmarks`` runs them all (``make bench``)."""

import os

# Threads that wait for each other by spinning would count as work in CPU seconds; OpenMP reads this when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
