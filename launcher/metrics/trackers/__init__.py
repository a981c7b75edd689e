"""Experiment trackers: TensorBoard, W&B, trackio and MLflow, each in a thread of rank 0's process.

``tracker.py`` has the protocol, ``tracker_threads.py`` the bounded queues and threads, ``to_NAME.py`` one adapter each.
"""
