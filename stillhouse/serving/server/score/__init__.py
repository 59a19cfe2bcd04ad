"""The role that computes a teacher's signals."""
