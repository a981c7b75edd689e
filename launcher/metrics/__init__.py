"""One record a step: metrics.jsonl is the truth; console and trackers read the same record."""
