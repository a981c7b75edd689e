"""Checks before a run, for this machine and every machine in a hostfile."""
