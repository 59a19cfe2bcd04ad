"""The public names and signatures, which must not change because other projects rely on them."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

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
    "acceptance": "",
    "alpha_beta": "alpha, beta",
    "parse_divergence": "text",
    "CrossEntropy": "labels_T, scale=1.0, label_smoothing=0.0, z_loss=0.0, *, weights_T=None, label=None",
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
        "correction=Correction(kind='none', limit=2.0), sequence_ratios_T=None, row_temperatures=None"
    ),
    "Entropy": "scale, temperature=1.0, *, weights_T=None, label=None",
    "linear_objective": (
        "hidden_TD, head, terms, *, weights_T=None, normalizer=1.0, valid_index=None, chunk_tokens=None"
    ),
    "logits_objective": "logits_TV, terms, *, shard=None, weights_T=None, normalizer=1.0",
    "linear_log_probs": "hidden_TD, head, labels_T, *, temperature=1.0",
}


#: public names outside of `stillhouse.objective`
OTHERS = {
    "StepLoss": ("objective, normalizer=1.0, chunk_tokens=None, parts=(), with_teacher_cross_entropy=False"),
    "Targets": "labels_T, weights_T=None, valid_index=None, mtp_targets=()",
    "PolicyTargets": (
        "labels_T, weights_T=None, valid_index=None, mtp_targets=(), advantages_T=None, old_log_probs_T=None, "
        "reference_log_probs_T=None"
    ),
    "DistillTargets": (
        "labels_T, weights_T=None, valid_index=None, mtp_targets=(), signals=<factory>, per_token=<factory>, "
        "document_T=None, position_ids_BS=None"
    ),
    "parse_objective": "text, temperature=1.0, scale_by_temperature_squared=False",
    "cross_entropy": "*, label_smoothing=0.0, z_loss=0.0, normalizer=1.0",
    "policy_gradient": (
        "*, clip_low=0.2, clip_high=0.2, kl_scale=0.0, entropy_bonus=0.0, temperature=1.0, normalizer=1.0"
    ),
    "selected_log_probs": "*, temperature=1.0",
    "check_same_tokenizer": "student, teacher",
    "load_tokenizer": "name_or_path, revision=None, trust_remote_code=False",
    "load_documents": "source, tokenizer, options, cache=None, processor=None, teachers=None",
    "LoadOptions": (
        "max_tokens, tokens='completion', on_error='raise', columns=(), allowed=<factory>, prefixes=<factory>, "
        "reader=None, prompts=False, keep_records=False, fits_teachers=True, tools=None, end_ids=()"
    ),
}
ROOT = Path(__file__).parents[2]
#: modules beside `stillhouse` that examples import: a public module, and what only the demo has
MODULES = {"stillhouse.models.mtp"} | {f"stillhouse.tools.demo.{name}" for name in ("corpus", "student", "tokenizer")}


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


@pytest.mark.parametrize("package", ["stillhouse.objective", "stillhouse.data"])
def test_names_that_are_imported_at_their_first_use_are_listed(package: str) -> None:
    """For `from stillhouse.objective import *` and a shell's completion, in a process without these names."""
    code = f"import {package} as package\nlisted = dir(package)\nfrom {package} import *\n"
    code += "assert set(package.__all__) <= {*dir()} and set(package.__all__) <= {*listed}"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", OTHERS)
def test_signature_of_a_name_of_the_package(name: str) -> None:
    assert shown(getattr(stillhouse, name)) == OTHERS[name]


def test_every_public_name_is_listed() -> None:
    page = (ROOT / "docs" / "output_processor.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`(\w+)`", page.partition("## Public names")[2].partition("\n## ")[0]))
    assert listed == set(stillhouse.__all__)
    assert all(getattr(stillhouse, name) is not None for name in stillhouse.__all__)


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_import_public_names(example: Path) -> None:
    nodes = list(ast.walk(ast.parse(example.read_text(encoding="utf-8"))))
    imported = {node.module: [name.name for name in node.names] for node in nodes if isinstance(node, ast.ImportFrom)}
    ours = {module: names for module, names in imported.items() if module and module.startswith("stillhouse")}
    assert set(ours.pop("stillhouse")) <= set(stillhouse.__all__)
    assert set(ours) <= (MODULES if example.stem == "mtp" else set())


def test_the_reference_has_the_signature_of_the_fast_path() -> None:
    assert shown(dense_objective) == CONTRACTS["linear_objective"]


def test_decoder_takes_what_transformers_models_take() -> None:
    decoder = stillhouse.models.Decoder
    assert shown(decoder.from_pretrained).startswith("name_or_path, revision=None, dtype=None, *")
    assert shown(decoder.forward) == (
        "input_ids, position_ids=None, attention_mask=None, *, processor=None, context=None, head=True, "
        "mtp_input_ids=None, is_padding=None, lengths=None, images=None, **backbone_kwargs"
    )
    assert shown(decoder.signal).startswith("input_ids, ")
    assert shown(stillhouse.models.OutputProcessor.__call__) == "*, hidden_states, head, context, depth=0"
