"""Experiments with real language models on two CPU cores: `make real`."""
