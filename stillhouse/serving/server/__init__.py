"""A server that computes a teacher's signals or generates completions. It needs stillhouse[serve]."""
