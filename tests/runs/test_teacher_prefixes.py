"""Prefixes in conversations, of documents and of the student's own completions, against float64 over whole logits.

What the teacher reads is rendered here by the tokenizer's own chat template, from all messages at once.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import slow
from kit.ranks import run_ranks
from kit.runs import evaluate, metrics, write_records, write_run
from kit.teacher_gradients import assert_same_as_float64, named_gradients
from kit.toy_tokenizer import PLAIN_TEMPLATE
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM

from stillhouse.config import load_config
from stillhouse.data import Documents, StepMicroBatches
from stillhouse.loops.rollouts import first_rollouts
from stillhouse.loops.session import Session
from stillhouse.output.folder import RunFolder
from stillhouse.parallel import ShardedMicroBatches
from stillhouse.run.run import prepare

PREFIX = "You know the answer: {answer}. "
SYSTEM = {"role": "system", "content": "Be brief."}
ROLLOUT = {"rollout.max_new_tokens": 9, "rollout.samples_per_prompt": 2, "rollout.prompts_per_step": 4}


def conversation(number: int) -> dict[str, Any]:
    """Every third one begins with a system message, and every other one has two turns."""
    turns = [{"role": "user", "content": f"{number} and two?"}, {"role": "assistant", "content": f"{number + 2}"}]
    again = [{"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}]
    return {"messages": [SYSTEM] * (number % 3 == 0) + turns + again * (number % 2), "answer": f"{number + 2}"}


RECORDS = [conversation(number) for number in range(24)]


def write(folder: Path, teacher: str, *, on_policy: bool) -> Path:
    """Write a run of one step; returns its configuration. teacher: `live` for the student itself, or a model."""
    (folder / "chat.jinja").write_text(PLAIN_TEMPLATE)
    write_records(folder / "train.jsonl", RECORDS)
    write_records(folder / "eval.jsonl", RECORDS[:6])
    by = {"student": "live"} if teacher == "live" else {"model": str(folder / "teacher")}
    settings: dict[str, Any] = {
        "teachers.knows": {**by, "prefix": PREFIX},
        "objective.loss": "reverse_kl",
        "data.chat_template": str(folder / "chat.jinja"),
        "data.max_tokens": 120,
        "train.tokens_per_step": 480,
        "train.micro_batch_tokens": 240,
        "train.steps": 1,
        "eval.every": 1,
        "out": str(folder / f"{teacher}-{on_policy}"),
    }
    write_run(folder)  # the teacher's folder
    write_run(folder, cached=True, **settings | (ROLLOUT if on_policy else {}))
    return (folder / "run.yaml").rename(folder / f"{teacher}-{on_policy}.yaml")


class Reference:
    """The student and its teacher in float64, one document at a time."""

    def __init__(self, folder: Path, teacher: str, session: Session):
        self.tokenizer = session.data.tokenizer
        self.student = AutoModelForCausalLM.from_pretrained(folder / "student", dtype=torch.float64).train()
        name = "student" if teacher == "live" else "teacher"
        self.teacher = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64).eval()

    def log_probs(self, documents: Documents, number: int) -> tuple[Tensor, Tensor]:
        """The teacher's and the student's at the document's targets."""
        ids = torch.tensor(documents.tokens(number)).long()
        rows = torch.tensor(documents.targets(number))[1:].nonzero()[:, 0]
        read = self.read_by_teacher(documents, number)
        shift = len(read) - len(ids)
        assert shift > 0
        assert torch.equal(read[-len(ids) + 1 :], ids[1:])
        q_log = self.student(ids[None]).logits[0][rows].log_softmax(1)
        with torch.no_grad():
            p_log = self.teacher(read[None]).logits[0][rows + shift].log_softmax(1)
        return p_log, q_log

    def read_by_teacher(self, documents: Documents, number: int) -> Tensor:
        """The whole conversation behind the prefix; of a sample, its prompt and the student's own completion."""
        source = documents.sources[number]
        record = RECORDS[int(source.rpartition(":")[2].partition(" ")[0]) - 1]
        messages = record["messages"]
        system = {"role": "system", "content": PREFIX.format(answer=record["answer"])}
        ids = documents.tokens(number).tolist()
        if "(sample" not in source:
            return torch.tensor(self._rendered([system, *messages]))
        prompt = messages[:-1]
        prefix = self._rendered(prompt, add_generation_prompt=True)
        assert ids[: len(prefix)] == prefix
        return torch.tensor(self._rendered([system, *prompt], add_generation_prompt=True) + ids[len(prefix) :])

    def _rendered(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def gradients(self, documents: Documents, chosen: list[int]) -> tuple[float, dict[str, Tensor]]:
        """The loss of these documents, the reverse KL per target token, and its gradients."""
        pairs = [self.log_probs(documents, number) for number in chosen]
        total = torch.stack([(q.exp() * (q - p)).sum() for p, q in pairs]).sum() / sum(len(p) for p, _ in pairs)
        self.student.zero_grad()
        total.backward()
        return total.item(), {name: parameter.grad for name, parameter in self.student.named_parameters()}

    def forward_kl(self, documents: Documents) -> float:
        with torch.no_grad():
            pairs = [self.log_probs(documents, number) for number in range(len(documents))]
        total = sum(kl_div(q, p, log_target=True, reduction="sum").item() for p, q in pairs)
        return total / sum(len(p) for p, _ in pairs)


def first_step(session: Session) -> tuple[ShardedMicroBatches, Documents, list[int]]:
    """The micro-batches of the first step, and its documents."""
    if session.rollout is not None:
        _, micro_batches = first_rollouts(session, RunFolder(Path(str(session.values["out"]))))
    else:
        micro_batches = session.models.shard(session.schedule.step_schedule.micro_batches(session.data.train, 0))
    whole: Any = micro_batches.all_ranks
    assert isinstance(whole, StepMicroBatches)
    chosen = sorted(document for number in range(len(whole)) for document in whole.documents_of(number))
    return micro_batches, whole.sequences.documents, chosen


#: the run's folder and configuration, and its teacher
Case = tuple[Path, Path, str]


@pytest.fixture(
    scope="module",
    params=[("other", True), ("other", False), ("live", True), slow(("live", False))],
    ids=["other on-policy", "other off-policy", "self on-policy", "self off-policy"],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    teacher, on_policy = request.param
    folder = tmp_path_factory.mktemp("prefixes")
    path = write(folder, teacher, on_policy=on_policy)
    return folder, path, teacher


def session_at(path: Path) -> Session:
    return prepare(load_config(path), announce=False)


def test_gradients_and_held_out_divergence_are_those_of_whole_logits(case: Case) -> None:
    folder, path, teacher = case
    session = session_at(path)
    reference = Reference(folder, teacher, session)
    micro_batches, documents, chosen = first_step(session)
    held_out = evaluate(session)["eval/forward_kl"]
    signals = session.models.source_for(session.models.engine).request(micro_batches).result()
    loss = session.models.engine.forward_backward(micro_batches, signals, micro_batches.all_ranks.normalizer).sums[
        "loss"
    ]
    actual = named_gradients(session.models.student.pretrained)
    session.close()
    assert session.data.evaluation is not None
    assert held_out == pytest.approx(reference.forward_kl(session.data.evaluation.documents), rel=1e-5)
    expected_loss, expected = reference.gradients(documents, chosen)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert_same_as_float64(actual, expected)


@pytest.mark.slow
def test_two_processes_train_as_whole_logits_say(case: Case) -> None:
    folder, path, teacher = case
    session = session_at(path)
    reference = Reference(folder, teacher, session)
    _, documents, chosen = first_step(session)
    session.close()
    loss, gradients = reference.gradients(documents, chosen)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
    assert session.data.evaluation is not None
    held_out = reference.forward_kl(session.data.evaluation.documents)
    out = folder / "two"
    run_ranks(2, "distill", path, "parallel.fsdp=2", f"out={out}")
    lines = metrics(out)
    trained = next(line for line in lines if "train/gradient_norm" in line)
    assert trained["loss/total_nats_per_token"] == pytest.approx(loss, rel=1e-5)
    assert trained["train/gradient_norm"] == pytest.approx(norm, rel=1e-4)
    evaluated = next(line for line in lines if "eval/forward_kl" in line)
    assert evaluated["step"] == 0
    assert evaluated["eval/forward_kl"] == pytest.approx(held_out, rel=1e-5)
