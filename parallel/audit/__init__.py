"""Audit of a step's numbers, recomputed on another rank: products, attention, updates."""
