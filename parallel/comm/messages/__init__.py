"""Checks that messages between ranks arrive as they were sent."""
