"""Loads causal language models, wraps each one as a backbone and a head (`Decoder`), and checks it."""

from stillhouse.models.adapter import add_lora, initialize_lora, without_lora
from stillhouse.models.decoder import Decoder
from stillhouse.models.families import add_end_ids, eos_ids, read_end_ids
from stillhouse.models.forward_modes import evaluating
from stillhouse.models.hidden_states import HiddenMatchLoss, HiddenPair, match_hidden
from stillhouse.models.layer_hooks import recorded
from stillhouse.models.lm_head import OutputProcessor
from stillhouse.models.load_proof import prove_decoder
from stillhouse.models.model_checks import (
    NotFiniteError,
    ProofError,
    check_document_length,
    check_finite_weights,
    check_saving,
    warn_of_positions,
)
from stillhouse.models.quantized import element_count, quantized_identity, weight_bytes
from stillhouse.models.router_balancing import RouterAuxLoss, balance_routers
from stillhouse.models.varlen import Activations
from stillhouse.models.vision_language import train_parts
from stillhouse.models.weight_files import model_fingerprint

__all__ = [
    "Activations",
    "Decoder",
    "HiddenMatchLoss",
    "HiddenPair",
    "NotFiniteError",
    "OutputProcessor",
    "ProofError",
    "RouterAuxLoss",
    "add_end_ids",
    "add_lora",
    "balance_routers",
    "check_document_length",
    "check_finite_weights",
    "check_saving",
    "element_count",
    "eos_ids",
    "evaluating",
    "initialize_lora",
    "match_hidden",
    "model_fingerprint",
    "prove_decoder",
    "quantized_identity",
    "read_end_ids",
    "recorded",
    "train_parts",
    "warn_of_positions",
    "weight_bytes",
    "without_lora",
]
