"""Clients of the servers that compute a teacher's signals, and of those that generate completions.

For signals, `remote_signals.py` is the store, `download.py` fetches the teacher's tokenizer and head, and
`signal_proof.py` proves the signals before the first step. For completions, `served_engine.py` is the engine,
`served_weights.py` updates the servers' weights, and `engine_proof.py` proves the servers' log-probabilities.
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
