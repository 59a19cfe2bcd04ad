"""The clients of servers: of a teacher's signals, and of completions.

`remote_signals.py`: the store of signals. `download.py`: the teacher's tokenizer and head. `signal_proof.py`: the
proof of a teacher's signals before the first step. `served_engine.py`: the engine that writes completions.
`served_weights.py`: the weights of its servers. `engine_proof.py`: the proof of these servers' log-probabilities.
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
