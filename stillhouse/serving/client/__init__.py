"""The client of a teacher's servers: `stillhouse serve`, vLLM and SGLang.

`pool.py`: sends requests, and repeats them. `api.py` and `*_api.py`: what each engine speaks. `remote.py`: the store
of signals. `download.py`: the teacher's tokenizer and head. `proof.py`: what is proven before the first step.
"""

from stillhouse.serving.client.api import NeedsModelError
from stillhouse.serving.client.pool import ServerError
from stillhouse.serving.client.proof import Proof, prove
from stillhouse.serving.client.remote import RemoteSignals, SignalRequest, connect

__all__ = ["NeedsModelError", "Proof", "RemoteSignals", "ServerError", "SignalRequest", "connect", "prove"]
