"""Stillhouse distills large language models: any teacher into any student, without materialising logits.

The names are imported at their first use, so that `import stillhouse` takes almost no time.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODULES = {
    "CrossEntropy": "stillhouse.objective",
    "Chosen": "stillhouse.objective",
    "DenseLogits": "stillhouse.objective",
    "Distill": "stillhouse.objective",
    "Entropy": "stillhouse.objective",
    "FullVocab": "stillhouse.objective",
    "Mixture": "stillhouse.objective",
    "ObjectiveOutput": "stillhouse.objective",
    "OutputHead": "stillhouse.objective",
    "PolicyGradient": "stillhouse.objective",
    "Sampled": "stillhouse.objective",
    "SampledKL": "stillhouse.objective",
    "TopK": "stillhouse.objective",
    "VocabShard": "stillhouse.objective",
    "acceptance": "stillhouse.objective",
    "alpha_beta": "stillhouse.objective",
    "forward_kl": "stillhouse.objective",
    "jsd": "stillhouse.objective",
    "linear_log_probs": "stillhouse.objective",
    "linear_objective": "stillhouse.objective",
    "logits_objective": "stillhouse.objective",
    "parse_divergence": "stillhouse.objective",
    "reverse_kl": "stillhouse.objective",
    "skew_forward_kl": "stillhouse.objective",
    "skew_reverse_kl": "stillhouse.objective",
    "total_variation": "stillhouse.objective",
    "Decoder": "stillhouse.models",
    "OutputProcessor": "stillhouse.models",
    "load_config": "stillhouse.config",
    "cross_entropy": "stillhouse.models.processors",
    "policy_gradient": "stillhouse.models.processors",
    "selected_log_probs": "stillhouse.models.processors",
    "DistillTargets": "stillhouse.models.processor_targets",
    "PolicyTargets": "stillhouse.models.processor_targets",
    "Targets": "stillhouse.models.processor_targets",
    "StepLoss": "stillhouse.engine.loss",
    "TEACHER": "stillhouse.objective",
    "parse_objective": "stillhouse.objective.spec",
    "LoadOptions": "stillhouse.data",
    "check_same_tokenizer": "stillhouse.data",
    "load_documents": "stillhouse.data",
    "load_tokenizer": "stillhouse.data",
}

if TYPE_CHECKING:
    from stillhouse.config import load_config
    from stillhouse.data import LoadOptions, check_same_tokenizer, load_documents, load_tokenizer
    from stillhouse.engine.loss import StepLoss
    from stillhouse.models import Decoder, OutputProcessor
    from stillhouse.models.processor_targets import DistillTargets, PolicyTargets, Targets
    from stillhouse.models.processors import cross_entropy, policy_gradient, selected_log_probs
    from stillhouse.objective import (
        TEACHER,
        Chosen,
        CrossEntropy,
        DenseLogits,
        Distill,
        Entropy,
        FullVocab,
        Mixture,
        ObjectiveOutput,
        OutputHead,
        PolicyGradient,
        Sampled,
        SampledKL,
        TopK,
        VocabShard,
        acceptance,
        alpha_beta,
        forward_kl,
        jsd,
        linear_log_probs,
        linear_objective,
        logits_objective,
        parse_divergence,
        reverse_kl,
        skew_forward_kl,
        skew_reverse_kl,
        total_variation,
    )
    from stillhouse.objective.spec import parse_objective

__all__ = [
    "TEACHER",
    "Chosen",
    "CrossEntropy",
    "Decoder",
    "DenseLogits",
    "Distill",
    "DistillTargets",
    "Entropy",
    "FullVocab",
    "LoadOptions",
    "Mixture",
    "ObjectiveOutput",
    "OutputHead",
    "OutputProcessor",
    "PolicyGradient",
    "PolicyTargets",
    "Sampled",
    "SampledKL",
    "StepLoss",
    "Targets",
    "TopK",
    "VocabShard",
    "acceptance",
    "alpha_beta",
    "check_same_tokenizer",
    "cross_entropy",
    "forward_kl",
    "jsd",
    "linear_log_probs",
    "linear_objective",
    "load_config",
    "load_documents",
    "load_tokenizer",
    "logits_objective",
    "parse_divergence",
    "parse_objective",
    "policy_gradient",
    "reverse_kl",
    "selected_log_probs",
    "skew_forward_kl",
    "skew_reverse_kl",
    "total_variation",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'stillhouse' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
