"""The public names of the package, which `__init__.py` imports at their first use."""

from stillhouse.data.data_report import DataReport
from stillhouse.data.document_loader import LoadOptions, load_documents
from stillhouse.data.documents import Documents
from stillhouse.data.micro_batch import MicroBatch, StepMicroBatches
from stillhouse.data.packed_rows import make_micro_batch
from stillhouse.data.packing import PackedMicroBatches, PackedSequences
from stillhouse.data.read.data_source import read_records
from stillhouse.data.record import DataError, NoSourceError
from stillhouse.data.render.tokenizers import (
    check_same_tokenizer,
    check_vocabulary,
    load_tokenizer,
    save_tokenizer,
    text_fingerprint,
    tokenizer_fingerprint,
)
from stillhouse.data.substitutions import Substitution, Substitutions

__all__ = [
    "DataError",
    "DataReport",
    "Documents",
    "LoadOptions",
    "MicroBatch",
    "NoSourceError",
    "PackedMicroBatches",
    "PackedSequences",
    "StepMicroBatches",
    "Substitution",
    "Substitutions",
    "check_same_tokenizer",
    "check_vocabulary",
    "load_documents",
    "load_tokenizer",
    "make_micro_batch",
    "read_records",
    "save_tokenizer",
    "text_fingerprint",
    "tokenizer_fingerprint",
]
