"""Stillhouse distills large language models: any teacher into any student, without materialising logits.

Each public name is imported at its first use, so that `import stillhouse` takes almost no time.
"""

from typing import TYPE_CHECKING

from stillhouse.first_use import names_at_first_use

__version__ = "0.1.0"

if TYPE_CHECKING:
    from stillhouse.config import load_config
    from stillhouse.data import LoadOptions, check_same_tokenizer, load_documents, load_tokenizer
    from stillhouse.engine.loss import StepLoss
    from stillhouse.models import Decoder, OutputProcessor
    from stillhouse.models.processors import (
        DistillTargets,
        PolicyTargets,
        Targets,
        cross_entropy,
        policy_gradient,
        selected_log_probs,
    )
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

#: the module from which each public name is imported
_MODULES = dict.fromkeys(__all__, "stillhouse.objective") | {
    "StepLoss": "stillhouse.engine.loss",
    "load_config": "stillhouse.config",
    "parse_objective": "stillhouse.objective.spec",
    **dict.fromkeys(("LoadOptions", "check_same_tokenizer", "load_documents", "load_tokenizer"), "stillhouse.data"),
    **dict.fromkeys(("Decoder", "OutputProcessor"), "stillhouse.models"),
    **dict.fromkeys(("DistillTargets", "PolicyTargets", "Targets"), "stillhouse.models.processors"),
    **dict.fromkeys(("cross_entropy", "policy_gradient", "selected_log_probs"), "stillhouse.models.processors"),
}
__getattr__, __dir__ = names_at_first_use(__name__, _MODULES)
