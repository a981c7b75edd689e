"""Resource estimates before a run starts, by arithmetic: device bytes, seconds per step, settings that fit."""
