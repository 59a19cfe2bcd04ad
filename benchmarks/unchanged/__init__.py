"""Shows that a version of the source tree computes what another one computes; see `__main__.py`."""
