"""Caches in the formats of other tools."""
