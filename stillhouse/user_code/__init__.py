"""Calls of the user's own Python functions, in this process or in worker processes. Nothing here imports torch."""
