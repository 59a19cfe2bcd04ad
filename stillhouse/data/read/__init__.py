"""Reads records from files, folders, globs, saved datasets and hub ids. Converts columns of other projects."""
