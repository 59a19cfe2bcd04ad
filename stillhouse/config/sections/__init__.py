"""One file for each section of the configuration: its keys, their types, defaults and descriptions."""
