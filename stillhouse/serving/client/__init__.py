"""Clients of servers that compute a teacher's signals, generate completions or give rewards."""
