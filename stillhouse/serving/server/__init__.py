"""A server of a teacher's signals, or of completions (see `run_server.py`). It needs stillhouse[serve]."""

from stillhouse.serving.server.run_server import serve

__all__ = ["serve"]
