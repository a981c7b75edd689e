"""Untrusted input: files and JSON read strictly, and their allowed contents."""
