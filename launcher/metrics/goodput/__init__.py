"""Effective training time (goodput): which seconds of a run trained the state that it goes on from."""
