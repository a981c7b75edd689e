"""From a layout and a mask: each rank's attention work and the rows that travel. Pure."""

from parallel.schedule.heads import AttentionShape
from parallel.schedule.schedule import Schedule

__all__ = ["AttentionShape", "Schedule"]
