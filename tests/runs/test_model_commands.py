"""`stillhouse chat`, `evaluate` and `generate`: as runs and plain transformers compute them; killed and resumed."""

import io
import json
import math
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import slow
from kit.config_cases import refused_calls
from kit.documents import ANSWER, EOS, QUESTION
from kit.runs import Command, json_lines, metrics, run, save_model, wait_for, write_records, write_run
from kit.serving import Server
from kit.stub_servers import stub_server
from kit.stub_vllm import Vllm
from kit.toy_tokenizer import toy_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from stillhouse import cli
from stillhouse.data import Documents, LoadOptions, load_documents
from stillhouse.display import escaped
from stillhouse.run.run import distill

SAME = ("data.max_tokens=32", "train.precision=fp32", "train.micro_batch_tokens=64", "--device", "cpu")
PROMPTS = [{"prompt": f"Two and {number} is", "completion": "5."} for number in range(12)]
#: most completions end, because the end of sequence has large logits of both signs
OFTEN_ENDS = 3.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run; a model whose completions often end, and the same with a chat template; prompts."""
    folder = tmp_path_factory.mktemp("commands")
    distill(write_run(folder, **{"train.steps": 2}))

    def change(model: Any) -> None:
        model.get_output_embeddings().weight[EOS] *= OFTEN_ENDS

    for name, chat in (("ends", None), ("chat", "plain")):
        save_model(folder / name, change=change, seed=3)
        toy_tokenizer(chat=chat).save_pretrained(folder / name)
    for name, chat in (("hollow", "plain"), ("thinks", "reasoning")):
        shutil.copytree(folder / "chat", folder / name, ignore=shutil.ignore_patterns("*.safetensors"))
        toy_tokenizer(chat=chat).save_pretrained(folder / name)
    write_records(folder / "prompts.jsonl", PROMPTS)
    return folder


def plain_figures(folder: Path, model: Path, documents: Documents) -> dict[str, float]:
    """Means over all targets, with plain transformers in float64, one document at a time."""
    sums = dict.fromkeys(("cross_entropy", "forward_kl", "reverse_kl", "agreement"), 0.0)
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in (model, folder / "teacher")]
    for document in range(len(documents)):
        ids = torch.from_numpy(documents.tokens(document).astype(np.int64))
        targets = torch.from_numpy(documents.targets(document)[1:])
        with torch.no_grad():
            q, p = (one(ids[None]).logits[0, :-1].log_softmax(-1)[targets] for one in models)
        sums["cross_entropy"] -= float(q.gather(1, ids[1:][targets][:, None]).sum())
        sums["forward_kl"] += float((p.exp() * (p - q)).sum())
        sums["reverse_kl"] += float((q.exp() * (q - p)).sum())
        sums["agreement"] += float((p.argmax(1) == q.argmax(1)).sum())
    return {f"eval/{name}": value / documents.target_counts_D.sum() for name, value in sums.items()}


def test_the_figures_of_a_model_are_those_that_its_run_has_logged(folder: Path, tmp_path: Path) -> None:
    models = folder / "out", folder / "student"
    data = ("--data", folder / "eval.jsonl", "--teacher", folder / "teacher", "--out", tmp_path / "results.json")
    ended = run("evaluate", *models, *data, *SAME)
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert list(results) == list(map(str, models))
    documents = load_documents(folder / "eval.jsonl", toy_tokenizer(), LoadOptions(max_tokens=32))
    for path, model, logged in ((models[0], models[0] / "model", -1), (models[1], models[1], 0)):
        figures = results[str(path)]
        lines = [line for line in metrics(folder / "out") if "eval/tokens" in line]
        expected = {key: value for key, value in lines[logged].items() if key.startswith("eval/")}
        assert {key: figures[key] for key in expected} == expected
        plain = plain_figures(folder, model, documents)
        assert {key: figures[key] for key in plain} == pytest.approx(plain, rel=1e-5)
        assert figures["eval/perplexity"] == pytest.approx(math.exp(plain["eval/cross_entropy"]), rel=1e-4)
        assert f"{figures['eval/reverse_kl']:.5g}" in ended.out
    assert "eval.jsonl: 8 documents, 112 tokens, 104 to predict" in ended.out
    assert "also in the training data" not in ended.err


def test_cut_and_split_records_are_named(folder: Path, tmp_path: Path) -> None:
    write_records(tmp_path / "long.jsonl", [{"prompt": "Two and", "completion": "three is five. " * 9}] * 2)
    ended = run("evaluate", folder / "student", "--data", tmp_path / "long.jsonl", *SAME)
    assert "2 cut at the limit (" in ended.out
    assert "a longer conversation or completion is cut at its end (2 were)" in ended.out
    assert "forward KL" not in ended.out


def share_of_letters(prompt: str, completion: str, record: dict[str, Any]) -> float:
    assert prompt.endswith(record["prompt"])
    return sum(map(str.isalpha, completion)) / max(1, len(completion))


def plain_completion(model: Any, tokenizer: Any, ids: list[int], tokens: int) -> str:
    with torch.no_grad():
        written = model.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, eos_token_id=EOS)
    return tokenizer.decode(written[0, len(ids) :], skip_special_tokens=True)


def test_the_reward_is_that_of_greedy_completions(folder: Path, tmp_path: Path) -> None:
    reward = (
        "--reward",
        f"{__name__}:share_of_letters",
        "eval.prompts.max_new_tokens=8",
        "--out",
        tmp_path / "r.json",
    )
    ended = run("evaluate", folder / "ends", "--data", folder / "prompts.jsonl", *reward, *SAME)
    tokenizer = AutoTokenizer.from_pretrained(folder / "ends")
    model = AutoModelForCausalLM.from_pretrained(folder / "ends", dtype=torch.float32)
    texts = [plain_completion(model, tokenizer, tokenizer(one["prompt"])["input_ids"], 8) for one in PROMPTS]
    expected = [share_of_letters("", text, {"prompt": ""}) for text in texts]
    results = json.loads((tmp_path / "r.json").read_text())["results"][str(folder / "ends")]
    assert results["eval/prompts/reward"] == pytest.approx(np.mean(expected))
    assert len(set(expected)) > 1
    assert "reward: greedy completions of 12 prompts (eval.prompts.count=64)" in ended.out


@pytest.mark.parametrize(("call", "message"), refused_calls("commands of models"))
def test_wrong_calls(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: str, message: str
) -> None:
    monkeypatch.chdir(folder)
    (folder / "running").mkdir(exist_ok=True)
    shutil.copy(folder / "run.yaml", folder / "running" / "config.yaml")
    write_records(folder / "bad.jsonl", [{"text": "Two"}, {"text": 5}])
    write_records(folder / "talks.jsonl", [{"messages": [QUESTION, ANSWER]}] * 2)
    if not (folder / "other").exists():
        save_model(folder / "other", text=("other words", "with other tokens"))
    (folder / "mine.jsonl").write_text("mine\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Two\n"))
    arguments, code = eval(call)
    assert cli.run(arguments.split()) == code
    assert message in capsys.readouterr().err
    assert (folder / "mine.jsonl").read_text() == "mine\n"


GENERATE = ("--max-new-tokens", "6", "--batch-size", "2", "--device", "cpu")


def generate(folder: Path, out: Path, *options: str | Path) -> list[dict[str, Any]]:
    prompts = folder / "prompts.jsonl"
    run("generate", "--model", folder / "ends", "--prompts", prompts, "--out", out, *GENERATE, *options)
    return json_lines(out)


def test_records_are_what_transformers_generates_and_what_data_train_reads(folder: Path, tmp_path: Path) -> None:
    kept, tokenizer = generate(folder, tmp_path / "kept.jsonl", "--keep-cut"), toy_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(folder / "ends", dtype=torch.float32)
    expected = [plain_completion(model, tokenizer, tokenizer(one["prompt"])["input_ids"], 6) for one in PROMPTS]
    texts = {record["number"]: record["completion"] for record in kept}
    assert texts == {number: text for number, text in enumerate(expected) if text}
    assert {record["finish"] for record in kept} == {"stop", "length"}
    records = generate(folder, tmp_path / "records.jsonl")
    assert records == [record for record in kept if record["finish"] == "stop"]
    documents = load_documents(tmp_path / "records.jsonl", tokenizer, LoadOptions(max_tokens=64))
    assert len(documents) == len(records)
    assert [record["source"] for record in records] == [
        f"{folder / 'prompts.jsonl'}:{record['number'] + 1}" for record in records
    ]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("messages", [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "old"}]),
        ("prompt", [{"role": "user", "content": "Two and two?"}]),
        ("conversations", [{"from": "human", "value": "Two and two?"}, {"from": "gpt", "value": "old"}]),
        ("instruction", "Two and two?"),
    ],
)
def test_conversations_in_every_form_become_messages(folder: Path, tmp_path: Path, column: str, value: Any) -> None:
    # the first record decides which column is the prompt
    records = [{column: value, "output": "old"}, {"note": "", column: value, "output": "old"}]
    if column == "messages":
        records[1]["prompt"] = "no"
    write_records(tmp_path / "prompts.jsonl", records)
    options = ("--model", folder / "chat", "--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "out.jsonl")
    run("generate", *options, *GENERATE, "--keep-cut")
    record, again = json_lines(tmp_path / "out.jsonl")
    question, answer = record["messages"]
    assert again["messages"] == record["messages"]
    assert question == {"role": "user", "content": "Two and two?"}
    assert answer["role"] == "assistant"
    assert answer["content"] not in ("", "old")
    load_documents(tmp_path / "out.jsonl", toy_tokenizer(chat="plain"), LoadOptions(max_tokens=64))


#: refuses answers with an "e"; writes an empty line in front of all others
CAPRICIOUS = """{% for message in messages %}{% if message.role == 'assistant' and 'e' in message.content %}
{{- raise_exception('an e') }}{% endif %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{{ '\\n' }}{% endif %}{{ message.content + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def test_answers_that_the_template_refuses_or_changes_are_counted(folder: Path, tmp_path: Path) -> None:
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = CAPRICIOUS
    shutil.copytree(folder / "ends", tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    asked = [{"messages": [{"role": "user", "content": f"Two and {number}?"}]} for number in range(12)]
    write_records(tmp_path / "prompts.jsonl", asked)
    options = ("--model", tmp_path / "model", "--prompts", tmp_path / "prompts.jsonl", "--keep-cut", *GENERATE)
    ended = run("generate", *options, "--out", tmp_path / "out.jsonl")
    records = json_lines(tmp_path / "out.jsonl")
    answers = [record["messages"][-1]["content"] for record in records]
    assert 0 < len(answers) < 12
    assert not any("e" in answer for answer in answers)
    assert f"left out: {12 - len(answers)} (empty, or refused by data.train)" in ended.out
    assert "prompts.jsonl:" in ended.err
    assert "the chat template refuses the messages: an e" in ended.err
    assert f"data.train reads {len(answers)} of the records as other tokens than the model generated" in ended.err


SAMPLED = ("--temperature", "0.7", "--top-p", "0.9", "--samples", "3", "--seed", "5")


@pytest.mark.parametrize("sampling", [SAMPLED, slow(())], ids=["sampled", "greedy"])
def test_a_killed_command_writes_what_an_undisturbed_one_writes(
    folder: Path, tmp_path: Path, sampling: tuple[str, ...]
) -> None:
    write_records(tmp_path / "prompts.jsonl", [{"prompt": f"Two and {number} is"} for number in range(24)])
    shared = ("generate", "--model", folder / "ends", "--prompts", tmp_path / "prompts.jsonl", *GENERATE, *sampling)
    out, killed = tmp_path / "out.jsonl", tmp_path / "killed.jsonl"
    assert "out.jsonl: " in run(*shared, "--out", out).out
    command = Command(*shared, "--out", killed)
    wait_for(lambda: killed.exists() and len(json_lines(killed)) >= 2)
    command.send(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    content = killed.read_bytes()
    assert out.read_bytes().startswith(content)
    assert content != out.read_bytes()
    killed.write_bytes(content[:-9])  # a line that is not complete
    run(*shared, "--out", killed)
    assert killed.read_bytes() == out.read_bytes()
    run(*shared, "--out", killed)
    assert killed.read_bytes() == out.read_bytes()
    if sampling:
        assert len({record["seed"] for record in json_lines(out)}) == len(json_lines(out))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--max-new-tokens", "7"], "was begun with other settings (max_new_tokens 6, now 7)"),
        (["--model", "chat"], "was begun with other settings (model ends, now chat"),
        (["--prompts", "others.jsonl"], "(prompts prompts.jsonl, now others.jsonl, prompts_hash "),
        (["--keep-cut"], "(keep_cut False, now True)"),
    ],
)
def test_a_file_of_other_settings_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: list[str], message: str
) -> None:
    monkeypatch.chdir(folder)
    write_records(folder / "others.jsonl", [{"prompt": "One"}])
    shared = ("generate", "--model", "ends", "--prompts", "prompts.jsonl", "--out", tmp_path / "out.jsonl", *GENERATE)
    run(*shared)
    before = (tmp_path / "out.jsonl").read_bytes()
    assert message in run(*shared, *change, code=1).err
    assert (tmp_path / "out.jsonl").read_bytes() == before
    for key in (b'"number": ', b'"model_identity": "'):
        damaged = before.replace(key, key + b"9", 1)
        (tmp_path / "out.jsonl").write_bytes(damaged)
        assert (
            "out.jsonl:1: expected a record of this command, with a number from 0 to 11" in run(*shared, code=1).err
        )
    (tmp_path / "out.jsonl.settings").unlink()
    assert "out.jsonl.settings is not beside it" in run(*shared, code=1).err
    assert (tmp_path / "out.jsonl").read_bytes() == damaged


def without_origin(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key != "model_identity"} for record in records]


def test_servers_write_what_the_job_writes(folder: Path, tmp_path: Path) -> None:
    expected = without_origin(generate(folder, tmp_path / "here.jsonl"))
    assert expected
    with Server(folder / "ends", "--generate") as server:
        assert without_origin(generate(folder, tmp_path / "served.jsonl", "--url", server.url)) == expected
    with stub_server(Vllm, folder / "ends") as vllm:
        options = ("--url", vllm.url, "--engine", "vllm")
        assert without_origin(generate(folder, tmp_path / "vllm.jsonl", *options)) == expected
        (tmp_path / "vllm.jsonl").write_bytes((tmp_path / "vllm.jsonl").read_bytes()[:-30])
        assert without_origin(generate(folder, tmp_path / "vllm.jsonl", *options)) == expected
    with stub_server(Vllm, folder / "student") as other:
        shared = ("--model", folder / "ends", "--prompts", folder / "prompts.jsonl", "--out", tmp_path / "vllm.jsonl")
        refused = run("generate", *shared, *GENERATE, "--url", other.url, "--engine", "vllm", code=1)
        assert "was begun with other settings (weights " in refused.err


def chat_with(monkeypatch: pytest.MonkeyPatch, lines: str, *arguments: str | Path, code: int = 0) -> tuple[str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    ended = run("chat", *arguments, "--device", "cpu", code=code)
    return ended.out, ended.err


def test_answers_are_those_of_plain_transformers_with_the_whole_conversation(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "chat")
    model = AutoModelForCausalLM.from_pretrained(folder / "chat", dtype=torch.float32)
    messages, expected = [{"role": "system", "content": "Be short."}], ""
    for question in ("Two and two?", "And three?"):
        messages.append({"role": "user", "content": question})
        expected += f"> {question}\n"
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        messages.append({"role": "assistant", "content": plain_completion(model, tokenizer, ids, 5)})
        expected += escaped(messages[-1]["content"], lines=True) + "\n"
    options = ("--system", "Be short.", "--max-new-tokens", "5")
    out, _ = chat_with(monkeypatch, "Two and two?\n\nAnd three?\n", folder / "chat", *options)
    lines = [line for line in out.rstrip("\n").split("\n") if not line.startswith("[cut at --max-new-tokens, after ")]
    assert "\n".join(lines) == expected.rstrip("\n")
    again, _ = chat_with(monkeypatch, "Two and two?\n/reset\nTwo and two?\n/quit\nno\n", folder / "chat", *options)
    half = len(again) // 2
    assert again[:half] == again[half:]


def test_the_teacher_of_the_run_answers_too_and_a_plain_text_is_continued(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = chat_with(monkeypatch, "Two and\n", folder / "out", "--against", "teacher", "--max-new-tokens", "4")
    assert err.count("has no chat template: the model continues the text as it is") == 2
    assert out.index(f"[{folder / 'out'}]\n") < out.index("[teacher]\n")
    tokenizer = toy_tokenizer()
    for name, path in (("teacher", folder / "teacher"), (str(folder / "out"), folder / "out" / "model")):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        text = plain_completion(model, tokenizer, tokenizer("Two and")["input_ids"], 4)
        assert f"[{name}]\n{escaped(text, lines=True)}" in out
    assert out.startswith("> Two and\n")


def test_a_conversation_beyond_the_positions_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    question = "two and three is five " * 40
    _, err = chat_with(monkeypatch, f"{question}\n", folder / "chat", code=1)
    assert "has 128 positions, and the conversation with this question has" in err
    out, _ = chat_with(monkeypatch, "two " * 50 + "\n", folder / "chat", "--max-new-tokens", "500")
    assert "[cut at the end of the model's 128 positions, after " in out or "[cut" not in out


@pytest.mark.slow
def test_a_terminal_streams_refuses_and_ends_with_ctrl_d(folder: Path) -> None:
    above, below = pty.openpty()
    command = [sys.executable, "-m", "stillhouse", "chat", str(folder / "chat"), "--max-new-tokens", "5", "--device"]
    process = subprocess.Popen([*command, "cpu"], stdin=below, stdout=below, stderr=below, close_fds=True)
    os.close(below)
    shown = ""

    def wait_until(text: str) -> None:
        nonlocal shown
        end = time.monotonic() + 120
        while text not in shown:
            assert time.monotonic() < end, shown
            shown += os.read(above, 4096).decode(errors="replace")
        shown = shown.partition(text)[2]

    wait_until("> ")
    os.write(above, b"two and three is five " * 40 + b"\n")
    wait_until("has 128 positions")
    wait_until("> ")
    os.write(above, b"Two and two?\n")
    wait_until("> ")
    os.write(above, b"/help\n")
    wait_until("/reset begins a new conversation")
    wait_until("> ")
    os.write(above, b"\x04")
    assert process.wait(60) == 0
    os.close(above)
