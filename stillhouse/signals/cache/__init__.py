"""A teacher's signals on disk: written once by `stillhouse cache`, read by any number of runs."""

from stillhouse.signals.cache.files import Manifest, document_id, target_rows
from stillhouse.signals.cache.reader import SignalCache

__all__ = ["Manifest", "SignalCache", "document_id", "target_rows"]
