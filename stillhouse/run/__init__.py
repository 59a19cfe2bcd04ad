"""Builds the objects of a run from its configuration, checks them, and starts the loop."""
