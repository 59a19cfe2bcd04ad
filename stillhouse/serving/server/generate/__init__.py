"""The role that writes completions, with weights that can be replaced."""
