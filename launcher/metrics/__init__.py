"""One record a step: metrics.jsonl is the truth; console and trackers read the same record."""

from launcher.metrics.console import console_line
from launcher.metrics.record import (
    DISCARDED_FILE,
    METRICS_FILE,
    TIMING_KEYS,
    Record,
    read_metrics,
    truncate_after,
    without_timing,
)
from launcher.metrics.writer import MetricsWriter

__all__ = [
    "DISCARDED_FILE",
    "METRICS_FILE",
    "TIMING_KEYS",
    "MetricsWriter",
    "Record",
    "console_line",
    "read_metrics",
    "truncate_after",
    "without_timing",
]
