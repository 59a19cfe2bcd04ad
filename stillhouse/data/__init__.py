"""Data: records read, turned into tokens and masks, packed, and batched. Labels are shifted once, here."""

from stillhouse.data.batches import Batch, make_batch
from stillhouse.data.documents import DataReport, Documents, load_documents
from stillhouse.data.packing import PackedSequences
from stillhouse.data.reading import DataError, read_records
from stillhouse.data.tokenizers import (
    check_same_tokenizer,
    check_vocabulary,
    load_tokenizer,
    tokenizer_fingerprint,
)

__all__ = [
    "Batch",
    "DataError",
    "DataReport",
    "Documents",
    "PackedSequences",
    "check_same_tokenizer",
    "check_vocabulary",
    "load_documents",
    "load_tokenizer",
    "make_batch",
    "read_records",
    "tokenizer_fingerprint",
]
