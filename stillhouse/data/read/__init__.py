"""From data sources to records: files, folders, globs, saved datasets and hub ids, and other projects' columns."""
