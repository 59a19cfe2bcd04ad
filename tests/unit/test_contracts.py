"""The public names and signatures, which must not change because other projects rely on them."""

import inspect

import pytest

import stillhouse
import stillhouse.models
import stillhouse.objective
from stillhouse.objective.reference import dense_objective

CONTRACTS = {
    "OutputHead": "weight_VD, bias=None, *, vocab_size=None, scale=1.0, softcap=None, shard=None",
    "VocabShard": "start, stop, group, reduce_hidden_grad=True",
    "FullVocab": "hidden_TE, head",
    "TopK": "ids_TK, log_probs_TK, tail='bucket', tail_log_prob_T=None, temperature=None",
    "Chosen": "ids_TK, log_probs_TK, tail='bucket', tail_log_prob_T=None, temperature=None",
    "Sampled": "ids_TM, weights_TM",
    "DenseLogits": "logits_TV",
    "Mixture": "signals, weights, temperature=1.0",
    "forward_kl": "",
    "reverse_kl": "",
    "jsd": "beta, normalized=False",
    "skew_forward_kl": "alpha",
    "skew_reverse_kl": "alpha",
    "total_variation": "",
    "alpha_beta": "alpha, beta",
    "parse_divergence": "text",
    "CrossEntropy": "labels_T, scale=1.0, label_smoothing=0.0, z_loss=0.0, *, weights_T=None",
    "Distill": (
        "signal, divergence, scale=1.0, temperature=1.0, scale_by_temperature_squared=False, *, weights_T=None, "
        "label=None"
    ),
    "SampledKL": (
        "labels_T, teacher_log_probs_T, estimator='k2', scale=1.0, temperature=1.0, *, weights_T=None, "
        "correction=Correction(kind='none', limit=2.0), old_log_probs_T=None, sampling_temperature=None, label=None"
    ),
    "PolicyGradient": (
        "labels_T, advantages_T, old_log_probs_T, reference_log_probs_T=None, clip_low=0.2, clip_high=0.2, "
        "kl_scale=0.0, scale=1.0, temperature=1.0, *, weights_T=None, dual_clip=None, surrogate='clip', "
        "correction=Correction(kind='none', limit=2.0), sequence_ratios_T=None"
    ),
    "Entropy": "scale, temperature=1.0, *, weights_T=None",
    "linear_objective": (
        "hidden_TD, head, terms, *, weights_T=None, normalizer=1.0, valid_index=None, chunk_tokens=None"
    ),
    "logits_objective": "logits_TV, terms, *, shard=None, weights_T=None, normalizer=1.0",
    "linear_log_probs": "hidden_TD, head, labels_T, *, temperature=1.0",
}


def shown(call: object) -> str:
    """Return a signature without annotations, `self` and private markers."""
    assert callable(call)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(call).parameters.values()
        if parameter.name != "self"
    ]
    return str(inspect.Signature(parameters))[1:-1]


@pytest.mark.parametrize("name", CONTRACTS)
def test_signature(name: str) -> None:
    assert shown(getattr(stillhouse.objective, name)) == CONTRACTS[name]
    assert getattr(stillhouse, name) is getattr(stillhouse.objective, name)


def test_the_reference_has_the_signature_of_the_fast_path() -> None:
    assert shown(dense_objective) == CONTRACTS["linear_objective"]


def test_decoder_takes_what_transformers_models_take() -> None:
    decoder = stillhouse.models.Decoder
    assert shown(decoder.from_pretrained).startswith("name_or_path, revision=None, dtype=None, *")
    assert shown(decoder.forward) == (
        "input_ids, position_ids=None, attention_mask=None, *, processor=None, context=None, head=True, "
        "mtp_input_ids=None, is_padding=None, lengths=None, **backbone_kwargs"
    )
    assert shown(decoder.signal).startswith("input_ids, ")
    assert shown(stillhouse.models.OutputProcessor.__call__) == "*, hidden_states, head, context, depth=0"
