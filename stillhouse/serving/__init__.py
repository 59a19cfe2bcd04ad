"""A server that gives a teacher's signals or generates completions; clients of this server, of vLLM and of SGLang."""

#: the media types of the bodies of requests and answers
SAFETENSORS, JSON = "application/vnd.safetensors", "application/json"
