"""Untrusted input: strict file and JSON reading, and checks for allowed contents."""
