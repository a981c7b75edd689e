"""NVIDIA's RULER: texts and answers of its thirteen tasks, drawn and fitted as in its scripts.

Each module below names the script that it follows. ``tasks.py`` makes tasks of them.
"""
