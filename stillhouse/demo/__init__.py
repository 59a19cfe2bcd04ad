"""The demo: a corpus that every Python carries, a shipped teacher, and the run that shows the main job."""
