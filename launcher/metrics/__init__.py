"""Metrics, one record per step: metrics.jsonl is the source of truth; console and trackers read the same record."""
