"""How each kind of server is asked for signals and completions: `stillhouse serve`, vLLM and SGLang."""
