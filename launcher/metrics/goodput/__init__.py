"""Effective training time (goodput): seconds of a run that trained the state it goes on from."""
