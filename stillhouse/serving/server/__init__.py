"""A server of a teacher's exact signals, or of completions (see `serve.py`). It needs the extra `serve`."""

from stillhouse.serving.server.serve import serve

__all__ = ["serve"]
