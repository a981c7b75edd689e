"""Resource estimates of a run, before it starts, by arithmetic: device bytes, seconds per step, settings that fit."""
