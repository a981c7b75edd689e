"""Processes, groups and collectives: meshes, sequence layouts, attention across ranks, ZeRO."""
