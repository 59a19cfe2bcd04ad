"""Checkpoints: saves the state of a run, and verifies and loads it."""
