"""Per-rank attention work and rows to send, computed from a layout and a mask. Pure."""

from parallel.schedule.attention_schedule import Schedule
from parallel.schedule.head_split import AttentionShape

__all__ = ["AttentionShape", "Schedule"]
