"""The demo: a corpus that is part of every Python installation, a shipped teacher, and two runs to compare."""
