"""The role that gives a teacher's exact signals."""
