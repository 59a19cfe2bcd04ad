"""Sources with weights, and several evaluation sets with their own metrics."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.layout_runs import assert_same_weights
from kit.ranks import run_ranks
from kit.runs import evaluate, forward_backward, metrics, run, session_of, write_run, write_texts
from kit.toy_tokenizer import toy_tokenizer

from stillhouse.config import ConfigError
from stillhouse.data import Documents, LoadOptions, PackedSequences, load_documents
from stillhouse.output.progress import folder_name
from stillhouse.run.run import data_reports, prepare
from stillhouse.tools.write_cache import write_cache

#: of three sources, and their records
WEIGHTS, SIZES = (0.7, 0.2, 0.1), (20, 300, 90)


def weighted(folder: Path, seed: int = 0) -> PackedSequences:
    paths = {str(at): write_texts(folder / f"{at}.jsonl", count, at) for at, count in enumerate(SIZES)}
    options = LoadOptions(max_tokens=32)
    sources = {name: load_documents(path, toy_tokenizer(), options) for name, path in paths.items()}
    return PackedSequences(Documents.joined(sources), max_tokens=32, seed=seed, weights=WEIGHTS)


def token_shares(sequences: PackedSequences, chosen: np.ndarray) -> np.ndarray:
    lengths_D = sequences.documents.lengths_D
    tokens = [int(lengths_D[sequences.members(sequence)].sum()) for sequence in chosen]
    return np.bincount(sequences.set_S[chosen], weights=tokens, minlength=3) / sum(tokens)


def test_the_shares_of_tokens_are_the_weights_and_the_seed_decides_the_order(tmp_path: Path) -> None:
    sequences, total = weighted(tmp_path), 2000
    steps = [sequences.step_sequences(step, 50, total) for step in range(40)]
    for step in steps:  # each step by itself, to a sequence
        assert token_shares(sequences, step) == pytest.approx(WEIGHTS, abs=0.06)
    chosen = np.concatenate(steps)
    assert token_shares(sequences, chosen) == pytest.approx(WEIGHTS, abs=0.005)
    assert sequences.trained_shares(total) == pytest.approx(token_shares(sequences, chosen))
    for number in range(3):  # no sequence comes again before all of its source have come
        of_source = chosen[sequences.set_S[chosen] == number]
        size = int((sequences.set_S == number).sum())
        for start in range(0, len(of_source) - size, size):
            assert len(set(of_source[start : start + size].tolist())) == size
    documents = sequences.documents
    for sequence in range(len(sequences)):
        assert len(set(documents.set_D[sequences.members(sequence)].tolist())) == 1
    one, other = weighted(tmp_path), weighted(tmp_path)
    for step in (0, 7, 3):
        assert np.array_equal(one.step_sequences(step, 50, 2000), other.step_sequences(step, 50, 4000))
    assert not np.array_equal(one.step_sequences(0, 50, 2000), weighted(tmp_path, seed=1).step_sequences(0, 50, 2000))


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    for name, seed in (("other", 5), ("chat", 6)):
        write_texts(folder / f"{name}.jsonl", 30, seed)
    mixed = [{"source": str(folder / "train.jsonl"), "weight": 3.0}, {"source": str(folder / "other.jsonl")}]
    return {
        "data.train": mixed,
        "data.eval": {"math": str(folder / "eval.jsonl"), "chat": str(folder / "chat.jsonl")},
        "checkpoint.best": "eval/math/cross_entropy",
    } | more


def test_each_set_has_the_metrics_of_an_evaluation_of_its_own(tmp_path: Path) -> None:
    config = write_run(tmp_path, **settings(tmp_path))
    session = prepare(config, announce=False)
    metrics_of_sets, documents = evaluate(session), session.data.evaluation
    assert documents is not None
    for name in ("cross_entropy", "forward_kl", "agreement"):
        parts = [
            (metrics_of_sets[f"eval/{one}/{name}"], metrics_of_sets[f"eval/{one}/tokens"]) for one in ("math", "chat")
        ]
        mean = sum(value * tokens for value, tokens in parts)
        assert metrics_of_sets[f"eval/{name}"] == pytest.approx(mean / metrics_of_sets["eval/tokens"], rel=1e-12)
    for name, source in config.data.eval_sets.items():
        alone = evaluate(session_of(tmp_path, **{"data.eval": source}))
        for key, value in alone.items():
            assert metrics_of_sets[f"eval/{name}/{key.removeprefix('eval/')}"] == pytest.approx(value, rel=1e-6)
    reports = data_reports(session.data, session.schedule.step_schedule)
    assert list(reports) == ["train", "train/1", "train/2", "eval", "eval/math", "eval/chat"]
    assert sum(reports[f"train/{number}"].trained_share or 0 for number in (1, 2)) == pytest.approx(1)


def test_a_source_that_is_wholly_held_out_is_named(tmp_path: Path) -> None:
    write_run(tmp_path)
    small = write_texts(tmp_path / "small.jsonl", 1, 5)
    sources = [{"source": str(tmp_path / "train.jsonl")}, {"source": str(small)}]
    with pytest.raises(ConfigError, match=rf"^data\.eval: got 0\.99, which holds out all 1 documents of {small}:"):
        session_of(tmp_path, **{"data.train": sources, "data.eval": 0.99})


@pytest.mark.parametrize("records", [1, 7])
def test_a_cache_of_a_mixture_gives_the_teachers_gradients(tmp_path: Path, records: int) -> None:
    """Also of a source of one document, which is several times in each step."""
    more = settings(tmp_path)
    write_texts(tmp_path / "other.jsonl", records, 5)
    more["data.train"][1]["weight"] = 9.0
    cache = write_cache(write_run(tmp_path, **more), tmp_path / "cache", "hidden")
    in_job = session_of(tmp_path, **more)
    stored = session_of(tmp_path, cached=True, **more, **{"teacher.cache": str(tmp_path / "cache")})
    rows = in_job.schedule.step_schedule.micro_batches(in_job.data.train, 0).rows
    assert (len(np.unique(np.concatenate(rows))) < sum(map(len, rows))) == (records == 1)
    documents = (in_job.data.train.documents, in_job.data.evaluation.documents)
    assert cache.documents == len({of.tokens(at).tobytes() for of in documents for at in range(len(of))})
    losses = [forward_backward(of_session).sums["loss"] for of_session in (in_job, stored)]
    norms = [of_session.models.engine.gradient_norm() for of_session in (in_job, stored)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)
    assert evaluate(stored) == pytest.approx(evaluate(in_job), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp=2", "pipeline=2"])
def test_two_processes_train_on_the_same_mixture(tmp_path: Path, layout: str) -> None:
    more = {"eval.every": 1, "checkpoint.every": 2, "checkpoint.keep": 9, "train.steps": 4}
    write_run(tmp_path, **settings(tmp_path), **more)
    run("distill", tmp_path / "run.yaml", f"out={tmp_path / 'one'}")
    start = tmp_path / "one" / "checkpoints" / folder_name(2)
    for out, overrides in (("two", []), ("resumed", [f"checkpoint.resume={start}"])):
        run_ranks(2, "distill", tmp_path / "run.yaml", f"out={tmp_path / out}", f"parallel.{layout}", *overrides)
        one, other = metrics(tmp_path / "one"), metrics(tmp_path / out)
        for expected, line in zip(one[-len(other) :], other, strict=True):
            compared = {key: value for key, value in line.items() if not key.startswith(("speed", "seconds"))}
            assert compared == pytest.approx({key: expected[key] for key in compared}, rel=1e-4), line["step"]
        assert_same_weights(tmp_path / out, tmp_path / "one")
    data = [json.loads((tmp_path / name / "data.json").read_text()) for name in ("one", "two", "resumed")]
    assert data[0] == data[1] == data[2]


@pytest.mark.slow
def test_a_run_on_a_mixture_resumes_to_the_bit_and_keeps_the_best_of_a_set(tmp_path: Path) -> None:
    more = {"eval.every": 1, "checkpoint.every": 2, "checkpoint.keep": 1}
    undisturbed = Path(write_run(tmp_path, **settings(tmp_path), **more).out)
    run("distill", tmp_path / "run.yaml")
    values = {line["step"]: line["eval/math/cross_entropy"] for line in metrics(undisturbed) if "eval/tokens" in line}
    kept = [path.name for path in (undisturbed / "checkpoints").iterdir()]
    assert folder_name(min((2, 4, 6), key=values.__getitem__)) in kept
    data = json.loads((undisturbed / "data.json").read_text())
    assert data["train/1"]["trained_share"] == pytest.approx(0.75, abs=0.1)
    run("distill", tmp_path / "run.yaml", f"out={tmp_path}/b", "checkpoint.keep=9")
    start = tmp_path / "b" / "checkpoints" / folder_name(2)
    run("distill", tmp_path / "run.yaml", f"out={tmp_path}/c", f"checkpoint.resume={start}")
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (undisturbed, tmp_path / "c")]
    assert weights[0] == weights[1]
