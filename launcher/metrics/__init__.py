"""One record a step: metrics.jsonl is the truth; console and TensorBoard read the same record."""
