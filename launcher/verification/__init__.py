"""Check that a run's own configuration, scaled down, computes each part as one plain process does."""
