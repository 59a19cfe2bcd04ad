"""A server of signals and completions, and clients for it, for vLLM and for SGLang."""
