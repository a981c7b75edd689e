"""NVIDIA's RULER: texts and answers for its thirteen tasks, sampled and fitted as in its scripts.

Each module below names the script that it follows. ``tasks.py`` builds tasks from them.
"""
