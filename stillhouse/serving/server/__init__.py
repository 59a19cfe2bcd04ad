"""A server of a teacher's exact signals, or of completions (see `run_server.py`). It needs the extra `serve`."""

from stillhouse.serving.server.run_server import serve

__all__ = ["serve"]
