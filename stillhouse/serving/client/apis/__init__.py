"""The requests to each kind of server for signals and completions: `stillhouse serve`, vLLM and SGLang."""
