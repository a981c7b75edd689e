"""Verification that messages between ranks arrive unchanged."""
