"""Checks of a machine, and of every machine of a hostfile, before a run."""
