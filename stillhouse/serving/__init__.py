"""A server of signals and completions, and clients for it, for vLLM and for SGLang."""

#: the media types of bodies
SAFETENSORS, JSON = "application/vnd.safetensors", "application/json"
