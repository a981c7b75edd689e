"""NVIDIA's RULER: the texts and answers of its thirteen tasks, drawn and fitted as its scripts do it.

Each module below says which script it follows. ``tasks.py`` makes tasks of them.
"""
