"""Effective training time (goodput): seconds that trained the state from which the run continues."""
