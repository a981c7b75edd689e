"""A step's numbers, computed again on another rank: products, attention, updates."""
