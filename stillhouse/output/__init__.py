"""The files that a run writes: their types, the log, trackers, and the model card."""
