"""What a run will take, before it starts, by arithmetic: bytes of a device, seconds of a step, settings that fit."""
