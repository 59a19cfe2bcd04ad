"""Training: one loop per regime over the same step, checkpoints, and what a run leaves behind."""
