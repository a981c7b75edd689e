"""Check that a run's own configuration, made small, computes each of its parts as one plain process does."""
