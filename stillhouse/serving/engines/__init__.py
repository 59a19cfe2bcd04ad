"""Clients of the servers that write completions."""
