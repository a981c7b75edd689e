"""Per-rank attention work and rows to send, computed from a layout and a mask. Pure."""

from parallel.schedule.heads import AttentionShape
from parallel.schedule.schedule import Schedule

__all__ = ["AttentionShape", "Schedule"]
