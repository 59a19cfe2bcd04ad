"""Tasks: the problems of a seed, the held-out split, the reward, the commands, and the exact match of real models."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from kit.config_cases import load, refused_calls
from kit.toy_tokenizer import toy_tokenizer

from benchmarks.task_models import character_tokenizer, new_model
from stillhouse import cli
from stillhouse.config import ConfigError
from stillhouse.data import LoadOptions, load_documents
from stillhouse.loops.greedy_evaluation import evaluate_tasks
from stillhouse.rollout import Completion, GenerationRequest
from stillhouse.tasks import SHORTEST, TASKS, Problem, TaskSpec, exact_match, is_held_out, problem

#: of seed 7: problems 0 and 4 for training, problem 1 held out
GOLDEN = {
    "sums": [("5-4=", "1", 2), ("3+14+19+12+11+12=", "71", 6), ("16+11-13=", "14", 3)],
    "reversal": [("reverse: hb =", "bh", 2), ("reverse: pzyzqg =", "gqzyzp", 6), ("reverse: dyi =", "iyd", 3)],
    "brackets": [("close: {}[{ =", "}]", 2), ("close: ({{}({}({{ =", "}}))})", 6), ("close: {}(({}( =", ")))", 3)],
}
CLOSING = {"(": ")", "[": "]", "{": "}"}


def answer(task: str, prompt: str) -> str:
    """The right answer, found in another way than the generator's."""
    if task == "sums":
        return str(eval(prompt.removesuffix("=")))
    if task == "reversal":
        return "".join(reversed(prompt.removeprefix("reverse: ").removesuffix(" =")))
    stack: list[str] = []
    for character in prompt.removeprefix("close: ").removesuffix(" ="):
        if character in CLOSING:
            stack.append(character)
        else:
            assert CLOSING[stack.pop()] == character
    return "".join(CLOSING[character] for character in reversed(stack))


@pytest.mark.parametrize("task", TASKS)
def test_the_problems_of_a_seed_are_those_of_every_machine(task: str) -> None:
    numbers = ((0, False), (4, False), (1, True))
    problems = [problem(TaskSpec.of(task), 7, number, held_out=held_out) for number, held_out in numbers]
    assert problems == [Problem(*golden) for golden in GOLDEN[task]]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("held_out", [False, True])
def test_answers_are_right_and_lengths_take_turns(task: str, held_out: bool) -> None:
    problems = [problem(TaskSpec(task, 2, 9), 1, number, held_out=held_out) for number in range(400)]
    for number, example in enumerate(problems):
        assert example.answer == answer(task, example.prompt)
        numbers = example.prompt.replace("-", "+").split("+")
        assert example.length == len(numbers if task == "sums" else example.answer) == 2 + number % 8
    assert len({problem.prompt for problem in problems}) > 300
    first, other = (problem(TaskSpec(task, 9, 9), seed, 0, held_out=held_out) for seed in (1, 2))
    assert first != other


@pytest.mark.parametrize("task", TASKS)
def test_no_problem_is_in_both_splits(task: str) -> None:
    """With short problems, of which few exist, so that both splits would meet if they could."""
    spec = TaskSpec(task, SHORTEST, SHORTEST)
    prompts = [(seed, number) for seed in range(3) for number in range(700)]
    train, held_out = ({problem(spec, *of, held_out=split).prompt for of in prompts} for split in (False, True))
    assert not train & held_out
    assert all(is_held_out(task, prompt) is (prompt in held_out) for prompt in train | held_out)
    # nearly all problems that exist have been drawn, so the sizes are those of the splits
    assert len(held_out) >= 10
    assert 0.1 < len(held_out) / len(train | held_out) < 0.4


@pytest.mark.parametrize(
    ("completion", "reward"), [("12", 1.0), (" 12\n", 1.0), ("1 2", 0.0), ("12 12", 0.0), ("", 0.0), ("-12", 0.0)]
)
def test_the_reward_is_one_for_the_answer_alone(completion: str, reward: float) -> None:
    answer = {"role": "assistant", "content": "12"}
    of_parts = {"role": "assistant", "content": [{"type": "text", "text": "12"}]}
    question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "read the digits"}]}
    for record in ({"completion": "12"}, {"messages": [question, answer]}, {"messages": [question, of_parts]}):
        assert exact_match("3+14-5=", completion, record) == reward


@pytest.mark.parametrize(("call", "message"), refused_calls("tasks"))
def test_a_wrong_task_is_refused(call: str, message: str) -> None:
    text = eval(call)
    with pytest.raises(ValueError, match=message):
        TaskSpec.parse(text)
    with pytest.raises(ConfigError, match=f"eval.tasks: {message}"):
        load("eval.tasks=" + json.dumps([text]))


def test_tasks_of_a_configuration() -> None:
    assert load("eval.tasks=[sums(2:4), reversal]").eval.tasks == ["sums(2:4)", "reversal"]
    assert TaskSpec.parse("sums(2:4)") == TaskSpec("sums", 2, 4)
    assert TaskSpec.parse("reversal") == TaskSpec("reversal", *TASKS["reversal"].lengths)
    with pytest.raises(ConfigError, match="expected each task once"):
        load("eval.tasks=[sums(2:4), sums]")


def test_the_file_is_training_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "folder"
    out, held_out = folder / "sums.jsonl", folder / "held_out.jsonl"
    arguments = ["task", "sums", "--count", "50", "--seed", "3", "--lengths", "2:4"]
    assert cli.run([*arguments, "--out", str(out)]) == 0
    assert cli.run([*arguments, "--held-out", "--out", str(held_out)]) == 0
    spec = TaskSpec("sums", 2, 4)
    expected = [problem(spec, 3, number, held_out=False) for number in range(50)]
    assert [json.loads(line) for line in out.read_text().splitlines()] == [
        {"prompt": row.prompt, "completion": row.answer, "task": "sums", "length": row.length} for row in expected
    ]
    assert all(is_held_out("sums", json.loads(line)["prompt"]) for line in held_out.read_text().splitlines())
    assert sorted(path.name for path in folder.iterdir()) == ["held_out.jsonl", "sums.jsonl"]
    assert "50 problems" in capsys.readouterr().out


@pytest.mark.parametrize(("call", "message"), refused_calls("commands of tasks"))
def test_wrong_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: str, message: str
) -> None:
    arguments, code = eval(call)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("mine")
    assert cli.run(arguments.split()) == code
    assert message in capsys.readouterr().err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"mine": "mine"}


def test_a_missing_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.run(["evaluate", str(tmp_path), "--tasks", "hellaswag"]) == 1
    assert "lm_eval not installed; pip install 'stillhouse[lm-eval]'" in capsys.readouterr().err


def test_the_harness_evaluates_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model prefers one digit by construction; of three examples, two call it right."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tokenizer, folder = character_tokenizer(), tmp_path / "model"
    model = new_model(tokenizer, 32, 1, seed=0)
    ids = torch.tensor([tokenizer("1+1=")["input_ids"]])
    digits = [tokenizer(str(digit))["input_ids"][0] for digit in range(10)]
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits[0, -1, digits]
    likely, unlikely = str(int(logits.argmax())), str(int(logits.argmin()))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = [{"q": "1+1=", "choices": [unlikely, likely], "a": right} for right in (1, 1, 0)]
    (tmp_path / "tiny.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tiny.yaml").write_text(
        f"task: tiny_choice\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/tiny.jsonl}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: a\ntarget_delimiter: ''\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    command = ["evaluate", str(folder), "--task-folder", str(tmp_path), "--out", str(tmp_path / "figures.json")]
    assert cli.run([*command, "--tasks", "nosuch"]) == 1
    assert cli.run([*command, "--tasks", "tiny_choice"]) == 0
    assert json.loads((tmp_path / "figures.json").read_text())["tiny_choice"]["acc,none"] == pytest.approx(2 / 3)


def test_a_prompt_has_the_tokens_that_it_has_in_training(tmp_path: Path) -> None:
    tokenizer, spec = toy_tokenizer(adds_bos=True, adds_eos=True), TaskSpec.of("brackets")
    problems = [problem(spec, 5, number, held_out=True) for number in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(problem.record("brackets")) + "\n" for problem in problems))
    documents = load_documents(str(tmp_path / "a.jsonl"), tokenizer, LoadOptions(max_tokens=512))
    requested: list[GenerationRequest] = []

    def generate(requests: Sequence[GenerationRequest]) -> list[Completion]:
        requested.extend(requests)
        return [completion_of(tokenizer.eos_token_id) for _ in requests]

    evaluate_tasks(generate, tokenizer, ["brackets"], 30, seed=5)
    assert len(requested) == len(documents) == 30
    for number, request in enumerate(requested):
        prompt = documents.tokens(number)[~documents.targets(number)]
        assert request.prompt_ids.tolist() == prompt.tolist()
        assert request.prompt_ids.dtype == np.int32
    assert [request.number for request in requested] == list(range(30))


def completion_of(*ids: int, finish: str = "stop") -> Completion:
    zeros = np.zeros(len(ids), dtype=np.float32)
    return Completion(np.array(ids, dtype=np.int32), zeros, zeros.astype(np.int32), finish)  # type: ignore[arg-type]


def test_figures_by_task_and_length() -> None:
    """Right answers for even numbers alone, and the other completions are cut."""
    tokenizer = character_tokenizer()

    def generate(requests: Sequence[GenerationRequest]) -> list[Completion]:
        completions = []
        for number, request in enumerate(requests):
            name = "sums" if number < 12 else "reversal"
            ids = tokenizer(answer(name, tokenizer.decode(request.prompt_ids.tolist())))["input_ids"]
            is_right = number % 2 == 0
            ending = tokenizer.eos_token_id if is_right else ids[0]
            completions.append(completion_of(*ids, ending, finish="stop" if is_right else "length"))
        return completions

    halves = ("sums", "sums/length_2", "sums/length_3", "sums/length_4", "reversal")
    expected = {f"eval/exact_match/{name}": 0.5 for name in halves} | {"eval/tasks_truncated": 0.5}
    expected |= {"eval/exact_match/reversal/length_2": 1.0, "eval/exact_match/reversal/length_3": 0.0}
    assert evaluate_tasks(generate, tokenizer, ["sums(2:4)", "reversal(2:3)"], 12, seed=0) == expected
    assert evaluate_tasks(generate, tokenizer, [], 12, seed=0) == {}
