"""The role that generates completions, with weights that can be replaced."""
