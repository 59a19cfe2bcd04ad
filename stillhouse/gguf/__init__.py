"""Models in GGUF files, the format of llama.cpp: converted once to a plain Hugging Face folder, and proven equal."""
