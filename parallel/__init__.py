"""Distributed training: process groups, collectives, device meshes, sequence layouts, ring attention, ZeRO."""
