"""Claims of docs/claims.md, measured again with real language models, by the same rule."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.claims.catalog import CLAIMS
from benchmarks.claims.claim import HOLDS, OPEN, WRONG, verdict_of
from benchmarks.claims.page import TEXTS

#: claim → the differences that it predicts to be positive: a figure of the first run minus that of the second
PREDICTIONS = yaml.safe_load("""
gkd:
  - {text: "reverse KL: dataset − own", runs: [dataset, own], figure: own_reverse_kl}
  - {text: "forward KL: dataset − own", runs: [dataset_forward, own_forward], figure: own_reverse_kl}
prefix-and-direction:
  - {text: "entropy, the dataset: forward − reverse KL", runs: [dataset_forward, dataset], figure: own_entropy}
  - {text: "entropy, own: forward − reverse KL", runs: [own_forward, own], figure: own_entropy}
  - {text: "agreement, own: reverse − forward KL", runs: [own, own_forward], figure: agreement}
  - {text: "agreement, reverse KL: own − the dataset", runs: [own, dataset], figure: agreement}
alpha-beta:
  - {text: "forward KL − JSD, cross-entropy", runs: [forward_kl, jsd], figure: cross_entropy}
  - {text: "reverse KL − JSD, cross-entropy", runs: [reverse_kl, jsd], figure: cross_entropy}
cross-tokenizer:
  - {text: "cross-entropy: text alone − ULD", runs: [cross_entropy, uld_trl], figure: cross_entropy}
student-init:
  - {text: "random − every second layer, cross-entropy", runs: [random, forward_kl], figure: cross_entropy}
""")
#: the seeds that a verdict needs
SEEDS = 3


def claims_table(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """The lines of a table. results: run → the result files of its seeds."""
    yield "| claim | small models | difference here | SmolLM2 |\n| --- | --- | --- | --- |"
    for name, predictions in PREDICTIONS.items():
        measured = [item for item in predictions if all(run in results for run in item["runs"])]
        if len(measured) < len(predictions):
            continue
        texts, seeds = [], []
        for item in measured:
            first, second = (
                {result["settings"]["seed"]: result["figures"][item["figure"]] for result in results[run]}
                for run in item["runs"]
            )
            seeds.append([first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())])
        if not all(seeds):  # no seed is common to both runs
            continue
        for item, values in zip(measured, seeds, strict=True):
            texts.append(f"{item['text']}: {statistics.mean(values):+.3f}")
        count = min(map(len, seeds))
        verdict = _verdict(seeds) if count >= SEEDS else f"{count} of {SEEDS} seeds"
        title = f"[{TEXTS[name]['title']}](../claims.md)"
        yield f"| {title} | {_small_verdict(name)} | {'; '.join(texts)} | {verdict} |"


def _verdict(differences: list[list[float]]) -> str:
    """The verdict by the rule of docs/claims.md, with margins of 0."""
    if any(max(values) < 0 for values in differences):
        return WRONG
    return HOLDS if all(min(values) > 0 for values in differences) else OPEN


def _small_verdict(name: str) -> str:
    claim = CLAIMS[name]
    path = claim.result_file(Path(__file__).parents[1] / "results")
    assert path is not None
    return verdict_of(claim, claim.figures(json.loads(path.read_text(encoding="utf-8"))))
