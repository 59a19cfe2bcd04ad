"""A server that computes a teacher's signals or generates completions. It needs stillhouse[serve]."""

from stillhouse.serving.server.run_server import serve

__all__ = ["serve"]
