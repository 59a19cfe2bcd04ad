"""A teacher's signals on disk: written once by `stillhouse cache`, read by any number of runs.

`format.py`: what the files are. `reader.py`: checks and reads them. `source.py`: the signal source of a run.
"""

from stillhouse.teachers.cache.format import Manifest, SignalSpec, document_id, target_rows
from stillhouse.teachers.cache.reader import SignalCache
from stillhouse.teachers.cache.source import CachedTeacher

__all__ = ["CachedTeacher", "Manifest", "SignalCache", "SignalSpec", "document_id", "target_rows"]
