"""Clients of servers that compute a teacher's signals (`remote_signals.py`) or generate completions
(`served_engine.py`).
"""

from stillhouse.serving.client.apis.server_api import NeedsModelError
from stillhouse.serving.client.pool import ServerError
from stillhouse.serving.client.remote_signals import RemoteSignals, connect
from stillhouse.serving.client.served_engine import ServedEngine
from stillhouse.serving.client.signal_proof import Proof, prove

__all__ = [
    "NeedsModelError",
    "Proof",
    "RemoteSignals",
    "ServedEngine",
    "ServerError",
    "connect",
    "prove",
]
