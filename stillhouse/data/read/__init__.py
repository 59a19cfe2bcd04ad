"""Reads records from files, folders, globs, saved datasets and hub ids, also with other projects' columns."""
