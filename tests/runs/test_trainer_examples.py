"""The objective in Hugging Face's Trainer and in TRL's SFTTrainer: gradients are those of the dense reference.

One optimizer step takes all documents. They have different lengths and come in several accumulated batches, so that a
mean of means, a wrong count of tokens or a label in the wrong row changes the gradient.

S tokens of a document.
"""

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
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

DOCUMENTS = 7
#: the norms of these models compute in float32, also in a model of float64
EXACT = 1e-6
ONE_STEP = {
    "max_steps": 1,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "max_grad_norm": 0.0,
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
    "learning_rate": "0.1",
    "per_device_train_batch_size": "1",
    "use_cpu": "true",
    "report_to": "none",
    "save_strategy": "no",
}

Gradients = dict[str, Tensor]


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
    return folder


@pytest.fixture(scope="module")
def hf_trainer() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / "hf_trainer.py"))


@pytest.fixture(scope="module")
def trl_sft() -> dict[str, Any]:
    pytest.importorskip("trl")
    return runpy.run_path(str(ROOT / "examples" / "trl_sft.py"))


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
        prompt = tokenizer(record["prompt"]).input_ids if "prompt" in record else []
        text = record["prompt"] + record["completion"] if "prompt" in record else record["text"]
        ids_S = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
        labels_S = [-100] * (len(prompt) or 1) + ids_S[len(prompt) or 1 :]
        yield ids_S, [*labels_S[1:], -100]


def gradients_of(trainer: Any, teacher: Decoder, *, dtype: torch.dtype = torch.float64) -> Gradients:
    """Train for a step, in which the weights are of this type, and return its gradients."""
    kept = KeepGradients()
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


@pytest.mark.parametrize("padded", [False, True])
def test_a_step_of_trainer_is_that_of_the_reference(
    folder: Path, tmp_path: Path, hf_trainer: dict[str, Any], padded: bool
) -> None:
    trainer = hf(hf_trainer, folder, tmp_path)
    if padded:
        trainer.data_collator = DataCollatorForLanguageModeling(
            AutoTokenizer.from_pretrained(folder / "student"), mlm=False
        )
    assert distance(gradients_of(trainer, trainer.model.teacher), reference(folder)) < EXACT


def test_trainers_autocast_is_as_near_to_float64_as_the_reference_under_autocast(
    folder: Path, tmp_path: Path, hf_trainer: dict[str, Any]
) -> None:
    exact = reference(folder)
    trainer = hf(hf_trainer, folder, tmp_path, bf16=True)
    ours = distance(gradients_of(trainer, trainer.model.teacher, dtype=torch.float32), exact)
    assert 1e-4 < ours < 1.1 * distance(reference(folder, dtype=torch.bfloat16), exact)


@pytest.mark.parametrize(
    ("data", "options"),
    [
        ("train.jsonl", {}),
        ("train.jsonl", {"packing": True, "max_length": 64, "per_device_train_batch_size": 1, "max_steps": -1}),
        ("pairs.jsonl", {"gradient_checkpointing": False}),
    ],
    ids=["padded", "packed", "completions"],
)
def test_a_step_of_trl_is_that_of_the_reference(
    folder: Path, tmp_path: Path, trl_sft: dict[str, Any], data: str, options: dict[str, Any]
) -> None:
    trainer = trl(trl_sft, folder, tmp_path, data, **({"bf16": False, "num_train_epochs": 1} | options))
    assert distance(gradients_of(trainer, trainer.teacher), reference(folder, data)) < EXACT


def test_trls_autocast_is_as_near_to_float64_as_the_reference_under_autocast(
    folder: Path, tmp_path: Path, trl_sft: dict[str, Any]
) -> None:
    exact = reference(folder)
    trainer = trl(trl_sft, folder, tmp_path, bf16=True)
    ours = distance(gradients_of(trainer, trainer.teacher, dtype=torch.float32), exact)
    assert 1e-4 < ours < 1.1 * distance(reference(folder, dtype=torch.bfloat16), exact)


@pytest.mark.parametrize("example", ["hf_trainer", "trl_sft"])
def test_two_processes_save_what_one_process_saves(folder: Path, tmp_path: Path, example: str) -> None:
    """The scripts as a user runs them; the saved folder is one of transformers."""
    if example == "trl_sft":
        pytest.importorskip("trl")
    one = weights_of(run_script(folder, example, tmp_path / "one", gradient_accumulation_steps="2"))
    two = weights_of(run_script(folder, example, tmp_path / "two", "--nproc-per-node=2"))
    start = weights_of(folder / "student")
    moved = {name: tensor - start[name] for name, tensor in one.items()}
    assert distance({name: tensor - start[name] for name, tensor in two.items()}, moved) < 1e-4


def run_script(folder: Path, example: str, out: Path, *torchrun: str, **options: str) -> Path:
    given = TWO_STEPS | options | {name: str(folder / name) for name in ("teacher", "student")}
    given |= {"data": str(folder / "train.jsonl"), "output_dir": str(out)}
    if example == "trl_sft":
        given["bf16"] = "false"
    launcher = ["-m", "torch.distributed.run", "--standalone", *torchrun] if torchrun else []
    command = [sys.executable, *launcher, f"{ROOT}/examples/{example}.py"]
    command += [f"--{name}={value}" for name, value in given.items()]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return out


def weights_of(folder: Path) -> Gradients:
    assert AutoTokenizer.from_pretrained(folder).eos_token == "</s>"
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def test_a_checkpoint_of_trainer_goes_on_to_the_bit(folder: Path, tmp_path: Path, hf_trainer: dict[str, Any]) -> None:
    options = {"max_steps": 4, "gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 2}
    straight = hf(hf_trainer, folder, tmp_path, **options)
    straight.train()
    resumed = hf(hf_trainer, folder, tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    expected = dict(straight.model.named_parameters())
    assert all(torch.equal(parameter, expected[name]) for name, parameter in resumed.model.named_parameters())
    losses = [trainer.evaluate(straight.train_dataset)["eval_loss"] for trainer in (straight, resumed)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("example", ["hf_trainer", "trl_sft"])
def test_without_arguments_an_example_explains_itself(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], example: str
) -> None:
    with pytest.raises(SystemExit):
        request.getfixturevalue(example)["main"]([])
    usage, problem = capsys.readouterr().err.splitlines()[-2:]
    assert usage.startswith(f"usage: python examples/{example}.py --teacher MODEL")
    assert "--teacher, --student, --data" in problem


@pytest.mark.parametrize("example", ["hf_trainer", "trl_sft"])
def test_a_teacher_with_another_tokenizer_is_refused(folder: Path, tmp_path: Path, example: str) -> None:
    other = save_model(tmp_path / "other", text=["other words, so that the ids mean something else"])
    main = runpy.run_path(str(ROOT / "examples" / f"{example}.py"))["main"]
    options = ["--teacher", str(other), "--student", str(folder / "student"), "--data", str(folder / "train.jsonl")]
    with pytest.raises(ValueError, match="student and teacher have different tokenizers"):
        main([*options, "--output_dir", str(tmp_path / "out"), "--use_cpu", "true", "--bf16", "false"])


def test_conversations_need_a_chat_template(folder: Path, tmp_path: Path, trl_sft: dict[str, Any]) -> None:
    """The error names the data, the student and the option; with the option, the run begins."""
    turns = [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "Four"}]
    chats = write_records(tmp_path / "chats.jsonl", [{"messages": turns}])
    expected = rf"{chats} has conversations, and the tokenizer of {folder / 'student'} has no chat template"
    with pytest.raises(ValueError, match=expected):
        trl(trl_sft, folder, tmp_path, str(chats))
    template = tmp_path / "own.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    trl(trl_sft, folder, tmp_path, str(chats), chat_template_path=str(template)).train()


def hf(example: dict[str, Any], folder: Path, out: Path, **options: Any) -> Any:
    names = {name: str(folder / name) for name in ("teacher", "student")}
    given = example["Options"](**names, data=str(folder / "train.jsonl"))
    return example["make_trainer"](given, TrainingArguments(output_dir=str(out), **(ONE_STEP | options)))


def trl(example: dict[str, Any], folder: Path, out: Path, data: str = "train.jsonl", **options: Any) -> Any:
    from trl import SFTConfig

    names = {name: str(folder / name) for name in ("teacher", "student")}
    given = example["Options"](**names, data=str(folder / data))
    return example["make_trainer"](given, SFTConfig(output_dir=str(out), **(ONE_STEP | options)))
