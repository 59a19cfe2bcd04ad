"""Servers of signals and completions, and the clients of ours, of vLLM and of SGLang."""
