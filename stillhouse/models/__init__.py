"""Causal language models as backbone and head (see `decoder.py`)."""

from stillhouse.models.adapter import add_lora, draw_lora, without_lora
from stillhouse.models.checks import check_document_length, check_finite_weights, check_saving
from stillhouse.models.decoder import Decoder, evaluating
from stillhouse.models.experts import balance_routers
from stillhouse.models.fingerprint import model_fingerprint
from stillhouse.models.head import OutputProcessor
from stillhouse.models.quantized import quantized_identity
from stillhouse.models.router_balance import RouterAuxLoss

__all__ = [
    "Decoder",
    "OutputProcessor",
    "RouterAuxLoss",
    "add_lora",
    "balance_routers",
    "check_document_length",
    "check_finite_weights",
    "check_saving",
    "draw_lora",
    "evaluating",
    "model_fingerprint",
    "quantized_identity",
    "without_lora",
]
