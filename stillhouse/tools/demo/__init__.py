"""The demo: a corpus that every Python contains, a shipped teacher, and two runs that show distillation."""
