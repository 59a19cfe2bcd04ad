"""The files that a run writes: their types, the log, trackers, the model card and the report."""
