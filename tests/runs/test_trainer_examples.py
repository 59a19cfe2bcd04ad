"""The objective in Hugging Face's Trainer and in TRL's SFTTrainer: gradients are those of the dense reference.

One optimizer step takes all documents. They have different lengths and come in several accumulated batches, so that a
mean of means, a wrong count of tokens or a label in the wrong row changes the gradient.

S tokens of a document.
"""

import os
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from kit.fork_server import fork_server
from kit.ranks import HOST, free_port
from kit.runs import ROOT, save_model, write_records, write_texts
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    TrainerCallback,
    TrainingArguments,
)

from stillhouse import CrossEntropy, Decoder, Distill, jsd
from stillhouse.objective.reference import dense_objective

pytestmark = pytest.mark.slow

SCRIPTS = ["hf_trainer", "trl_sft"]
DOCUMENTS = 7
LIMIT = 180
#: the norms of these models compute in float32, also in a model of float64
EXACT = 1e-6
ONE_STEP = {
    "max_steps": 1,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "max_grad_norm": 0.0,
    "num_train_epochs": 1,
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
}
#: a run of the script: with SGD, weights differ as gradients do
TWO_STEPS = {
    "max_steps": "2",
    "optim": "sgd",
    "max_grad_norm": "0",
    "bf16": "false",
    "learning_rate": "0.1",
    "per_device_train_batch_size": "1",
    "use_cpu": "true",
    "report_to": "none",
    "save_strategy": "no",
}

Gradients = dict[str, Tensor]

CHAT = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ message['content'] + '\\n' }}{% else %}"
    "{% generation %}{{ message['content'] }}</s>{% endgeneration %}{% endif %}{% endfor %}"
)


class KeepGradients(TrainerCallback):
    """Keeps the gradients with which the optimizer steps, by the names of the Hugging Face model."""

    def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
        plain = model.student.pretrained if hasattr(model, "student") else model
        self.gradients = {name: parameter.grad.clone() for name, parameter in plain.named_parameters()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student with scaled logits, and a teacher with dropout, which only its eval mode turns off."""
    folder = tmp_path_factory.mktemp("trainers")
    save_model(folder / "student", "granite", seed=1)
    save_model(folder / "teacher", "gpt2", seed=2)
    write_texts(folder / "train.jsonl", DOCUMENTS)
    words = [record["text"].split(" ") for record in Dataset.from_json(str(folder / "train.jsonl"))]
    write_records(
        folder / "pairs.jsonl", [{"prompt": word[0], "completion": " " + " ".join(word[1:])} for word in words]
    )
    turns = [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "Four"}]
    chats = [
        [*turns, {"role": "user", "content": word[0]}, {"role": "assistant", "content": word[-1]}] for word in words
    ]
    write_records(folder / "chats.jsonl", [{"messages": chat} for chat in chats])
    (folder / "chat.jinja").write_text(CHAT)
    return folder


@cache
def script(name: str) -> dict[str, Any]:
    """The names of a script of examples/. The test is skipped if the script's library is not installed."""
    pytest.importorskip("trl" if name == "trl_sft" else "transformers")
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))


def make_trainer(name: str, folder: Path, out: Path, data: str = "train.jsonl", **options: Any) -> Any:
    """The trainer that a script makes for one step. options: others of the trainer's arguments."""
    paths = {model: str(folder / model) for model in ("teacher", "student")}
    arguments = TrainingArguments if name == "hf_trainer" else script(name)["SFTConfig"]
    if data == "chats.jsonl":
        paths["chat_template"] = str(folder / "chat.jinja")
    return script(name)["make_trainer"](
        script(name)["Options"](**paths, data=str(folder / data)),
        arguments(output_dir=str(out), **(ONE_STEP | options)),
    )


def reference(folder: Path, data: str = "train.jsonl", *, dtype: torch.dtype = torch.float64) -> Gradients:
    """The gradients of one step, document by document, from dense logits: in float64, or in bfloat16 by autocast."""
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16)
    weights = torch.float32 if dtype == torch.bfloat16 else dtype
    student = Decoder.from_pretrained(folder / "student", dtype=weights)
    teacher = Decoder.from_pretrained(folder / "teacher", dtype=weights)
    documents = list(tokenized(folder, data))
    tokens = sum(sum(label >= 0 for label in labels_S) for _, labels_S in documents)
    for ids_S, labels_S in documents:
        ids_1S, labels_S = torch.tensor([ids_S]), torch.tensor(labels_S)
        with autocast:
            hidden_SD = student.backbone(input_ids=ids_1S).last_hidden_state[0]
            terms = [CrossEntropy(labels_S, scale=0.3), Distill(teacher.signal(ids_1S), jsd(0.5), scale=0.7)]
            weights_S = (labels_S >= 0).to(weights)
            output = dense_objective(hidden_SD, student.output_head(), terms, weights_T=weights_S, normalizer=tokens)
        output.loss.backward()
    return {name: parameter.grad for name, parameter in student.pretrained.named_parameters()}


def tokenized(folder: Path, data: str) -> Any:
    """Yield ids and next ids of each document; −100 where the next one is in the prompt or there is none."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "student")
    for record in Dataset.from_json(str(folder / data)):
        if "messages" in record:
            ids_S, is_target_S = chat(tokenizer, record["messages"])
            labels_S = [token if is_target else -100 for token, is_target in zip(ids_S, is_target_S, strict=True)]
            yield ids_S, [*labels_S[1:], -100]
            continue
        prompt = tokenizer(record["prompt"]).input_ids if "prompt" in record else []
        text = record["prompt"] + record["completion"] if "prompt" in record else record["text"]
        ids_S = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
        labels_S = [-100] * (len(prompt) or 1) + ids_S[len(prompt) or 1 :]
        yield ids_S, [*labels_S[1:], -100]


def chat(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
    """Return the ids of a conversation, and whether a token is of the assistant, by the characters of its turns."""
    text, of_assistant = "", []
    for message in messages:
        start, is_answer = len(text), message["role"] == "assistant"
        text += message["content"] + ("</s>" if is_answer else "\n")
        of_assistant += [(start, len(text))] if is_answer else []
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    is_target = [any(start <= begin < stop for start, stop in of_assistant) for begin, _ in encoded.offset_mapping]
    return encoded.input_ids, is_target


def gradients_of(trainer: Any, *, dtype: torch.dtype = torch.float64) -> Gradients:
    """Train for a step, in which the weights are of this type, and return its gradients."""
    kept = KeepGradients()
    teacher = trainer.teacher if hasattr(trainer, "teacher") else trainer.model.teacher
    trainer.add_callback(kept)
    trainer.model.to(dtype)
    teacher.to(dtype)
    trainer.train()
    assert trainer.state.global_step == 1
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in teacher.parameters())
    return kept.gradients


def distance(gradients: Gradients, expected: Gradients) -> float:
    """The relative distance of all gradients together."""
    assert set(gradients) == set(expected)
    pairs = [(gradients[name].detach().double(), tensor.detach().double()) for name, tensor in expected.items()]
    error, size = (
        sum(part.square().sum() for part in parts) for parts in ([a - b for a, b in pairs], [b for _, b in pairs])
    )
    return float((error / size).sqrt())


PACKED = {"packing": True, "max_length": 64, "per_device_train_batch_size": 1, "max_steps": -1}


@pytest.mark.parametrize(
    ("name", "data", "options"),
    [
        pytest.param("hf_trainer", "train.jsonl", {}, id="trainer"),
        pytest.param("hf_trainer", "pairs.jsonl", {}, id="trainer, completions"),
        pytest.param("hf_trainer", "chats.jsonl", {}, id="trainer, messages"),
        pytest.param("trl_sft", "train.jsonl", {}, id="padded"),
        pytest.param("trl_sft", "train.jsonl", PACKED, id="packed"),
        pytest.param("trl_sft", "pairs.jsonl", {"gradient_checkpointing": False}, id="completions"),
    ],
)
def test_a_step_is_that_of_the_reference(
    folder: Path, tmp_path: Path, name: str, data: str, options: dict[str, Any]
) -> None:
    trainer = make_trainer(name, folder, tmp_path, data, **options)
    assert distance(gradients_of(trainer), reference(folder, data)) < EXACT


def test_a_step_with_the_padding_of_transformers_is_that_of_the_reference(folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer("hf_trainer", folder, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder / "student")
    trainer.data_collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)  # makes the labels itself
    trainer.train_dataset = trainer.train_dataset.remove_columns("labels")
    assert distance(gradients_of(trainer), reference(folder)) < EXACT


@pytest.mark.parametrize("name", SCRIPTS)
def test_autocast_is_as_near_to_float64_as_the_reference_under_autocast(
    folder: Path, tmp_path: Path, name: str
) -> None:
    exact = reference(folder)
    trainer = make_trainer(name, folder, tmp_path, bf16=True)
    ours = distance(gradients_of(trainer, dtype=torch.float32), exact)
    assert 1e-4 < ours < 1.1 * distance(reference(folder, dtype=torch.bfloat16), exact)


@pytest.mark.parametrize("name", SCRIPTS)
def test_two_processes_save_what_one_process_saves(folder: Path, tmp_path: Path, name: str) -> None:
    """The scripts in this process, and as two ranks of a job. The saved folder is one of transformers."""
    script(name)["main"](script_arguments(folder, tmp_path / "one", gradient_accumulation_steps="2"))
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": HOST, "MASTER_PORT": str(free_port())}
    arguments = (name, script_arguments(folder, tmp_path / "two"), job)
    ranks = [fork_server().Process(target=run_rank, args=(rank, *arguments), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LIMIT)
    assert [process.exitcode for process in ranks] == [0, 0]
    one, two = (weights_of(tmp_path / out) for out in ("one", "two"))
    start = weights_of(folder / "student")
    moved = {name: tensor - start[name] for name, tensor in one.items()}
    assert distance({name: tensor - start[name] for name, tensor in two.items()}, moved) < 1e-4


def run_rank(rank: int, name: str, arguments: list[str], job: dict[str, str]) -> None:
    """Run a script with the variables that torchrun sets."""
    os.environ |= job | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    script(name)["main"](arguments)


def script_arguments(folder: Path, out: Path, **options: str) -> list[str]:
    """Return the arguments of a script for two steps. options: others of the trainer's arguments"""
    paths = {model: str(folder / model) for model in ("teacher", "student")}
    files = {"data": str(folder / "train.jsonl"), "output_dir": str(out)}
    return [f"--{option}={value}" for option, value in (TWO_STEPS | options | paths | files).items()]


def weights_of(folder: Path) -> Gradients:
    assert AutoTokenizer.from_pretrained(folder).eos_token == "</s>"
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def test_a_checkpoint_of_trainer_goes_on_to_the_bit(folder: Path, tmp_path: Path) -> None:
    options = {"max_steps": 4, "gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 2}
    straight, resumed = (make_trainer("hf_trainer", folder, tmp_path, **options) for _ in range(2))
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    expected = dict(straight.model.named_parameters())
    assert all(torch.equal(parameter, expected[name]) for name, parameter in resumed.model.named_parameters())
    losses = [trainer.evaluate(straight.train_dataset)["eval_loss"] for trainer in (straight, resumed)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_arguments_an_example_explains_itself(capsys: pytest.CaptureFixture[str], name: str) -> None:
    with pytest.raises(SystemExit):
        script(name)["main"]([])
    usage, problem = capsys.readouterr().err.splitlines()[-2:]
    assert usage.startswith(f"usage: python examples/{name}.py --teacher MODEL")
    assert "--teacher, --student, --data" in problem


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_teacher_with_another_tokenizer_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    other = save_model(tmp_path / "other", text=("other words, so that the ids mean something else",))
    options = ["--teacher", str(other), "--student", str(folder / "student"), "--data", str(folder / "train.jsonl")]
    options += ["--output_dir", str(tmp_path / "out"), "--use_cpu", "true", "--bf16", "false"]
    with pytest.raises(ValueError, match="student and teacher have different tokenizers"):
        script(name)["main"](options)


def test_conversations_need_a_chat_template(folder: Path, tmp_path: Path) -> None:
    """The error names the data, the student and the option; with the option, the run begins."""
    turns = [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "Four"}]
    chats = write_records(tmp_path / "chats.jsonl", [{"messages": turns}])
    expected = rf"{chats} has conversations, and the tokenizer of {folder / 'student'} has no chat template"
    with pytest.raises(ValueError, match=expected):
        make_trainer("trl_sft", folder, tmp_path, str(chats))
    template = tmp_path / "own.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    make_trainer("trl_sft", folder, tmp_path, str(chats), chat_template_path=str(template)).train()
