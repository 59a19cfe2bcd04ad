"""Checkpoints: what a run saves, and the proof that what it loads is what was saved."""
