"""Training: the training loop over the engine's steps, checkpoints, and the files that a run writes."""
