"""Supervised fine-tuning on data with columns of its own, and runs with a user's own divergence."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.config_cases import refused_calls
from kit.layout_runs import assert_same_weights, distill
from kit.on_policy_runs import assert_same_under_layouts, write_module
from kit.ranks import Ranks
from kit.runs import contents, metrics, refused, run, write_records, write_run
from kit.toy_tokenizer import toy_tokenizer

from stillhouse.output.progress import read_state
from stillhouse.run.run import prepare
from stillhouse.tools.check import print_check

OWN = [{"question": f"{number} and two?", "answer": f"four {number % 7}"} for number in range(40)]
OURS = [{"prompt": record["question"], "completion": record["answer"]} for record in OWN]
COLUMNS: dict[str, Any] = {"data.columns": {"prompt": "question", "completion": "answer"}}
#: a run on conversations, whose rows need more room
CHATS: dict[str, Any] = {"data.max_tokens": 256, "train.tokens_per_step": 512, "train.micro_batch_tokens": 256}


def with_chat(folder: Path) -> None:
    toy_tokenizer(chat="reasoning").save_pretrained(folder / "student")


def chats(thoughts: str = "") -> list[dict[str, Any]]:
    """Conversations of two turns, of which the first has another length in each record."""
    first = {"role": "assistant", "content": "four", "reasoning_content": thoughts}
    second = {"role": "assistant", "content": "five"}
    asked = [{"role": "user", "content": text} for text in ("two and two?", "two and three?")]
    return [{"messages": [asked[0] | {"content": "two? " * n}, first, asked[1], second]} for n in range(1, 25)]


def test_own_columns_train_the_same_student(tmp_path: Path) -> None:
    """Also held-out data, a share of the training data that is held out, and a source of its own in a mixture."""
    for name, records in (("own", OWN), ("ours", OURS)):
        write_records(tmp_path / f"{name}.jsonl", records)
    mixture = [
        {"source": str(tmp_path / "ours.jsonl")},
        {"source": str(tmp_path / "own.jsonl"), "columns": COLUMNS["data.columns"]},
    ]
    for held_out in (0.1, "file"):
        for name, settings in (("own", COLUMNS), ("ours", {})):
            path = str(tmp_path / f"{name}.jsonl")
            settings |= {"data.train": path, "data.eval": path if held_out == "file" else held_out}
            write_run(tmp_path, teacher=False, out=str(tmp_path / f"{name}-{held_out}"), **settings)
            run("distill", tmp_path / "run.yaml")
        own, ours = (tmp_path / f"{name}-{held_out}" for name in ("own", "ours"))
        assert metrics_without_times(own) == metrics_without_times(ours)
        assert contents(own / "model") == contents(ours / "model")
    session = prepare(write_run(tmp_path, teacher=False, **{"data.train": mixture, "data.eval": 0.1}), announce=False)
    counts = [report.read for report in session.data.train.documents.reports.values()]
    assert counts == [40, 40]


def metrics_without_times(out: Path) -> list[dict[str, float]]:
    return [{key: line[key] for key in line if key[:5] not in ("secon", "speed")} for line in metrics(out)]


@pytest.mark.slow
def test_supervised_runs_are_the_same_under_torchrun(tmp_path: Path) -> None:
    """On prompts with completions under names of their own, and on the last turns of conversations."""
    write_records(tmp_path / "own.jsonl", OWN)
    write_records(tmp_path / "chats.jsonl", chats())
    write_run(tmp_path, teacher=False)
    with_chat(tmp_path)
    for name, settings in (("own", COLUMNS), ("chats", CHATS | {"data.turns": "last"})):
        settings = settings | {"data.train": str(tmp_path / f"{name}.jsonl"), "data.eval": 0.1}
        write_run(tmp_path, teacher=False, **settings)
        for processes in (1, 2):
            distill(tmp_path, f"{name}-{processes}", processes)
        assert_same_weights(tmp_path / f"{name}-2", tmp_path / f"{name}-1")


def test_turns_are_a_part_of_the_run(tmp_path: Path) -> None:
    """A mixture can have both, and a run with other turns is another run."""
    sources = [{"source": str(tmp_path / "a.jsonl")}, {"source": str(tmp_path / "b.jsonl"), "turns": "last"}]
    for source in sources:
        write_records(Path(source["source"]), chats())
    write_run(tmp_path, teacher=False)
    with_chat(tmp_path)
    settings = CHATS | {"data.eval": 0, "train.steps": 1}
    session = prepare(write_run(tmp_path, teacher=False, **{"data.train": sources}, **settings), announce=False)
    both, last = (report.target_tokens for report in session.data.train.documents.reports.values())
    assert 0 < last < both
    assert "assistant turns (in some sources the last)" in session.loss.in_words
    write_run(tmp_path, teacher=False, **{"data.train": str(tmp_path / "a.jsonl")}, **settings)
    run("distill", tmp_path / "run.yaml")
    assert "data.turns" in run("distill", tmp_path / "run.yaml", "data.turns=last", code=1).err


def test_check_says_that_turns_are_trained_without_their_thoughts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_records(tmp_path / "chats.jsonl", chats("Twice two."))
    write_run(tmp_path, teacher=False)
    with_chat(tmp_path)
    settings = CHATS | {"data.train": str(tmp_path / "chats.jsonl"), "data.eval": 0}
    print_check(write_run(tmp_path, teacher=False, **settings))
    assert "In 24 turns, the student learns to answer without thoughts." in capsys.readouterr().out
    print_check(write_run(tmp_path, teacher=False, **settings, **{"data.turns": "last"}))
    shown = capsys.readouterr().out
    assert "thoughts" not in shown
    assert "and the last turn of conversations; none of prompts" in shown


def test_prompts_of_an_on_policy_run_have_own_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards get the record under the names of the file; held-out prompts have the same names."""
    write_records(tmp_path / "own.jsonl", OWN)
    write_module(
        tmp_path, monkeypatch, "own_rewards", "def known(prompt, completion, record): return len(record['answer'])"
    )
    of_both = {"max_new_tokens": 4, "reward": "own_rewards:known"}
    settings = COLUMNS | {
        "data.train": str(tmp_path / "own.jsonl"),
        "data.eval": 0,
        "objective.loss": "policy_gradient",
        "rollout": {"samples_per_prompt": 2, "prompts_per_step": 2, **of_both},
        "eval.prompts": {"data": str(tmp_path / "own.jsonl"), "count": 3, **of_both},
        "train.steps": 1,
    }
    write_run(tmp_path, teacher=False, **settings)
    run("distill", tmp_path / "run.yaml")
    evaluated = [line["eval/prompts/reward"] for line in metrics(tmp_path / "out") if "eval/prompts/reward" in line]
    assert evaluated == [len("four 1")] * 2
    samples = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert all(sample["reward"] == len("four 1") for sample in samples)


LOSSES = """
from dataclasses import dataclass
from stillhouse.objective import Divergence
from stillhouse.objective.numerics import difference, interpolation


@dataclass(frozen=True)
class Chi2(Divergence):
    alpha: float = 0.5

    def balanced(self, pair):
        gap, m = self.gap(pair)
        return gap * (gap / m)

    def balanced_slope(self, pair):
        gap, m = self.gap(pair)
        return (pair.q / m) * gap * (2 - (1 - self.alpha) * (gap / m))

    def gap(self, pair):
        return difference(pair.p, pair.q, pair.ratio), interpolation(pair.p, pair.q, self.alpha)


@dataclass(frozen=True)
class Wrong(Chi2):
    def balanced_slope(self, pair):
        return 2 * super().balanced_slope(pair)
"""


@pytest.mark.parametrize(("call", "message"), refused_calls("losses of a run"))
def test_a_class_that_cannot_be_a_loss_is_refused_by_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, message: str
) -> None:
    write_module(tmp_path, monkeypatch, "own_losses", LOSSES)
    key, _, loss = call.partition("=")
    with refused(key, message):
        prepare(write_run(tmp_path, **{key: loss}), announce=False)


def test_a_resumed_run_warns_of_another_source_of_its_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(tmp_path, monkeypatch, "own_losses", LOSSES)
    write_run(tmp_path, **{"objective.loss": "0.5*own_losses:Chi2(0.3)", "train.steps": 2, "checkpoint.every": 1})
    run("distill", tmp_path / "run.yaml")
    assert "loss/own_losses:Chi2(alpha=0.3)_nats_per_token" in metrics(tmp_path / "out")[1]
    state = next((tmp_path / "out" / "checkpoints").glob("step-*1/state.json"))
    assert "own_losses" in read_state(state.parent).progress.sources
    shutil.rmtree(tmp_path / "out" / "model")
    shutil.rmtree(next((tmp_path / "out" / "checkpoints").glob("step-*2")))
    (tmp_path / "own_losses.py").write_text(f"{LOSSES}\n# changed\n")
    ended = run("distill", tmp_path / "run.yaml")
    assert "the source of own_losses has changed since the checkpoint was written" in ended.out + ended.err


@pytest.mark.slow
def test_an_own_divergence_has_the_same_gradients_under_all_layouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(tmp_path, monkeypatch, "own_losses", LOSSES)
    write_run(tmp_path, **{"objective.loss": "0.3*cross_entropy + 0.5*own_losses:Chi2(0.3) + 0.2*forward_kl"})
    assert_same_under_layouts(tmp_path)


@pytest.mark.slow
def test_ranks_with_another_source_of_a_divergence_are_refused(tmp_path: Path) -> None:
    """Each rank imports the module of its own machine. Here, each has a folder of its own."""
    write_run(tmp_path, **{"objective.loss": "own_losses:Chi2"})
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "own_losses.py").write_text(f"{LOSSES}\n# {rank}\n")
    ranks = Ranks(2, "distill", tmp_path / "run.yaml", hook=_from_own_folder, hook_arguments=(tmp_path,))
    assert set(ranks.wait(180)) == {1}
    assert "the module own_losses of the loss: rank 1 and rank 0 read different files" in ranks.err


def _from_own_folder(folder: Path) -> None:
    sys.path.insert(0, str(folder / os.environ["RANK"]))
