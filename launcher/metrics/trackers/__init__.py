"""Experiment trackers besides TensorBoard: W&B, trackio and MLflow, each in a process of its own.

``feed.py`` is the trainer's side: a thread and a bounded queue. ``process.py`` is the tracker's side: it reads lines
from the trainer and hands them to one of the adaptors ``to_wandb.py``, ``to_trackio.py`` and ``to_mlflow.py``.
"""
