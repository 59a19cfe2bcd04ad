"""A server that writes completions (see `serve.py`). It needs the extra `serve`."""

from stillhouse.serving.generate.serve import serve_completions

__all__ = ["serve_completions"]
