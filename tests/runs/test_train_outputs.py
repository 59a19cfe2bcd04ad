"""The printed lines and the files of a run, and the output of `stillhouse check`, which writes no files."""

import hashlib
import io
import json
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from kit import slow
from kit.runs import contents, forward_backward, metrics, run, session_of, write_records, write_run
from kit.toy_tokenizer import toy_tokenizer

from stillhouse import display
from stillhouse.config import load_config
from stillhouse.output.folder import RunFolder
from stillhouse.output.log import RunLog
from stillhouse.output.progress import Progress
from stillhouse.tools.check import print_check

COMMON_KEYS = {"step", "tokens", "seconds"}
TRAIN_KEYS = COMMON_KEYS | {
    *(f"loss/{name}_nats_per_token" for name in ("total", "cross_entropy", "jsd(0.5)")),
    *("train/student_entropy_nats", "train/teacher_entropy_nats", "train/agreement", "train/learning_rate"),
    *("train/gradient_norm", "speed/tokens_per_second", "speed/step_seconds", "speed/chunk_tokens"),
}
EVAL_KEYS = COMMON_KEYS | {
    *("eval/tokens", "eval/cross_entropy", "eval/forward_kl", "eval/agreement", "eval/student_entropy"),
    *("eval/teacher_entropy", "eval/teacher_cross_entropy"),
}
ENVIRONMENT_KEYS = ["objective", "stillhouse", "python", "torch", "transformers", "platform", "cpu", "cores"]
ENVIRONMENT_KEYS += ["threads", "device", "gpu", "commit", "date", "seed"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A complete run's folder, and what the run has printed."""
    folder = tmp_path_factory.mktemp("finished")
    write_run(folder, seed=3, track=["tensorboard"])
    return folder / "out", run("distill", folder / "run.yaml").out


def test_the_run_folder(finished: tuple[Path, str]) -> None:
    out, printed = finished
    lines = metrics(out)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 6, 6]
    assert all(line.keys() == (EVAL_KEYS if "eval/tokens" in line else TRAIN_KEYS) for line in lines)
    for key in ("tokens", "seconds"):
        assert [line[key] for line in lines] == sorted(line[key] for line in lines)
    assert all(0 <= line[key] <= 1 for line in lines for key in line if key.endswith("agreement"))
    assert load_config(out / "config.yaml") == load_config(out.parent / "run.yaml")
    environment = json.loads((out / "environment.json").read_text())
    assert (list(environment), environment["seed"]) == (ENVIRONMENT_KEYS, 3)
    data = json.loads((out / "data.json").read_text())
    assert (data["train"]["records"], data["eval"]["documents"]) == (40, 8)
    assert json.loads((out / "tokens.json").read_text())["step"] == 6
    assert {path.name for path in out.iterdir()} >= {"checkpoints", "model", "tensorboard"}
    assert not list(out.rglob("*.partial"))
    assert printed.startswith("minimise 0.3 × cross-entropy + 0.7 × jsd(0.5) of teacher and student, ")
    assert "\nreading the data …\nloading the models …\n" in printed
    assert f"train: {out.parent}/train.jsonl: 40 documents, " in printed
    assert f"model: {out}/model" in printed
    assert re.search(
        r"^step 6/6: [\d,]+ tokens/s, total \d\.\d{4}, cross_entropy \d\.\d{4}, jsd\(0\.5\) \d\.\d{4}, "
        r"rate [\de.-]+, gradient [\d.]+, 00:0\d left$",
        printed,
        re.MULTILINE,
    )
    assert re.search(r"^step 6: held-out cross entropy \d\.\d{4}, forward kl ", printed, re.MULTILINE)


def test_a_short_schedule_a_long_warm_up_and_a_tiny_floor_are_warned_of(tmp_path: Path) -> None:
    few = {"train.steps": None, "train.epochs": 1, "train.tokens_per_step": 2048}
    (warning,) = session_of(tmp_path, **few).warnings
    assert warning.startswith("the run has only 1 optimizer step, because train.tokens_per_step is 2,048 and ")
    (warning,) = session_of(tmp_path, **{"train.min_learning_rate": 1e-6, "train.learning_rate": 1e-3}).warnings
    assert warning.startswith("train.min_learning_rate=1e-06 is a share of the peak")
    assert warning.endswith("ends at 1e-09")
    assert session_of(tmp_path, **{"train.min_learning_rate": 0.1}).warnings == []
    (warning,) = session_of(tmp_path, **{"train.warmup": 6}).warnings
    assert warning.startswith("train.warmup=6 is not shorter than the run (6 steps), so that")
    assert session_of(tmp_path, **{"train.warmup": 5}).warnings == []


def test_warnings_about_the_data_are_shown(tmp_path: Path) -> None:
    """With a chat template that ends turns without a special token, for example, a student never learns to stop."""
    write_run(tmp_path)
    tokenizer = toy_tokenizer(chat="plain")
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "")
    for name in ("student", "teacher"):
        tokenizer.save_pretrained(tmp_path / name)
    turns = [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "Four"}]
    for name in ("train.jsonl", "eval.jsonl"):
        write_records(tmp_path / name, [{"messages": turns}] * 9)
    warnings = session_of(tmp_path).data.train.documents.report.warnings
    assert warnings
    shown = run("check", tmp_path / "run.yaml").out
    assert all(warning in shown for warning in warnings)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


FIGURES = {
    **{"loss/total_nats_per_token": 1.5, "loss/forward_kl_nats_per_token": 1.25, "speed/tokens_per_second": 1e4},
    **{"train/learning_rate": 2e-5, "train/gradient_norm": 0.71234},
}


def test_the_live_line_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with RunLog(RunFolder(tmp_path), Progress(), 4, []) as log:
        for step in range(1, 3):
            log.train(step, step, FIGURES)
        log._bar.refresh()
    last = terminal.getvalue().rstrip().rpartition("\r")[2]
    assert "2/4" in last
    assert "10,000 tokens/s, total 1.5000, forward_kl 1.2500" in last
    assert re.search(r"\[\d\d:\d\d\].*, \d\d:\d\d left$", last), "expected the elapsed and the remaining time"


def test_the_time_left_includes_the_runs_that_follow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog(RunFolder(tmp_path), Progress(), 2, [], later_steps=10**9) as log:
        for step in (1, 2):
            log.train(step, step, FIGURES)
    last = capsys.readouterr().out.splitlines()[-1]
    hours = re.search(r"(\d+):\d\d:\d\d left for all runs", last)
    assert hours, last
    assert int(hours[1]) > 0


def test_without_a_terminal_some_steps_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step is printed every ten seconds, and the last one; its line has figures of rollouts."""
    rollout = {"rollout/reward": 0.125, "rollout/completion_tokens": 1311.6, "speed/waiting": 0.314}
    with RunLog(RunFolder(tmp_path), Progress(), 9, []) as log:
        for step in range(1, 10):
            log.train(step, step, FIGURES | (rollout if step > 1 else {}))
    first, last = capsys.readouterr().out.splitlines()
    assert first == "step 1/9: 10,000 tokens/s, total 1.5000, forward_kl 1.2500, rate 2e-05, gradient 0.712, ? left"
    assert last.startswith("step 9/9: 10,000 tokens/s, total 1.5000, forward_kl 1.2500, rate 2e-05, gradient 0.712, ")
    assert last.endswith("reward 0.125, length 1,312, waiting 31%, 00:00 left")


def test_the_time_left_includes_the_evaluations_to_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 12 s, and evaluations of 30 s after steps 0, 2 and 4, which are not counted as the time of a step."""
    now = 0.0
    monkeypatch.setattr("stillhouse.output.log.time.monotonic", lambda: now)
    with RunLog(RunFolder(tmp_path), Progress(), 4, [], evaluated=[0, 2, 4]) as log:
        for step in range(5):
            if step:
                now += 12.0
                log.train(step, step, FIGURES | {"loss/total_nats_per_token": 1.25})
            if step in (0, 2, 4):
                with log.evaluating(step):
                    now += 30.0
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(", ")[2] for line in lines] == ["? left", "01:24 left", "00:42 left", "00:30 left"]
    assert lines[1].startswith("step 2/4: 10,000 tokens/s, forward_kl 1.2500, rate "), (
        "expected no total beside one term"
    )


@pytest.mark.parametrize(("rank", "seconds", "shown"), [("0", 1.0, "loading …\n"), ("0", 0.0, ""), ("1", 1.0, "")])
def test_a_phase_is_named_if_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str, seconds: float, shown: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(display, "SLOW_SECONDS", 0.5)
    with display.named_if_slow("loading"):
        time.sleep(seconds)
    time.sleep(0.6)
    assert capsys.readouterr().err == shown


@pytest.mark.parametrize("kept", [0, 4])
def test_lines_after_the_checkpoint_and_half_lines_are_cut(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": n}) + "\n" for n in (0, 1, 2, 2, 3)]
    path.write_text("".join(lines) + '{"step": 1, "lo')
    beginning = "".join(lines[:kept]).encode()
    with RunLog(RunFolder(tmp_path), Progress(log_bytes=len(beginning)), 9, []) as log:
        assert log.position == (len(beginning), hashlib.sha256(beginning).hexdigest())
        log.train(7, 7, {"speed/tokens_per_second": 1.0})
        assert log.position == (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    assert [line["step"] for line in metrics(tmp_path)] == [*(0, 1, 2, 2)[:kept], 7]


@pytest.mark.parametrize("compiles", [False, slow(True)])
def test_check_shows_everything_and_leaves_nothing(tmp_path: Path, compiles: bool) -> None:
    """Each stage that may take minutes is named before it begins, and the data are shown before models are loaded."""
    loss = "1e-4*cross_entropy + 0.7*jsd(0.5) - 0.01*entropy + 1e-4*z_loss"
    write_run(tmp_path, **{"objective.loss": loss, "data.train": str(tmp_path / "prompts.jsonl")})
    write_records(tmp_path / "prompts.jsonl", [{"prompt": "The still ", "completion": "is heated"}] * 3)
    before = contents(tmp_path)
    shown = run("check", tmp_path / "run.yaml", *["--compile"] * compiles)
    assert contents(tmp_path) == before
    assert not (tmp_path / "out").exists()
    times = r"[\d.]+ s \([\d.]+ s the first time, when the loss is compiled\)"
    times = times if compiles else r"[\d.]+ s when nothing is compiled"
    for line in (
        r"student +LlamaForCausalLM, [\d,]+ parameters, float32, head of 400 rows",
        r"teacher +Qwen3ForCausalLM, [\d,]+ parameters, float32, head of 400 rows",
        r"tokenizer +400 tokens, hash [0-9a-f]{12}, the same for student and teacher",
        r"data train +.*prompts.jsonl: 3 documents, ",
        r"data eval +.*eval.jsonl: 8 documents, ",
        r"packing +\d+ sequences?, \d+% full",
        r"steps +6, each with 4 sequences of at most 32 tokens, 2 per micro-batch",
        r"run folder +.*/out: a new run",
        r".*The still ⟦is heated</s>⟧",
        rf"one step +[\d,]+ tokens in {times}, loss [\d.]+",
        r"all steps +6 steps at this speed: [\d.]+ (s|min \d\d s), without evaluations",
        r"  cross_entropy +gradient norm [\d.e-]+",
        r"  jsd\(0\.5\) +gradient norm [\d.]+",
        r"  entropy +gradient norm [\d.e-]+",
    ):
        assert re.search(f"^{line}", shown.out, re.MULTILINE), line
    checked = shown.out.splitlines()
    stages = [number for number, line in enumerate(checked) if line.endswith(" …")]
    again = r"running the step again, with what was compiled in [\d.]+ s …"
    size, now = "running one step (sequences: 4, micro-batches: 2)", "the loss is" if compiles else "nothing is"
    expected = [
        ("reading the data …", "data train "),
        ("loading the models …", "student "),
        (f"{size}: the teacher's signals …", "running one step"),
        (f"{size}: forward and backward; {now} compiled …", "running the step" if compiles else "one step "),
        *([(again, "one step ")] if compiles else []),
        ("running the same step with each of 4 losses alone …", "  cross_entropy "),
    ]
    for at, (stage, follower) in zip(stages, expected, strict=True):
        assert checked[at] == stage or (stage == again and re.fullmatch(again, checked[at]))
        assert checked[at + 1].startswith(follower)
    before_models = "\n".join(checked[: stages[1]])
    assert all(f"\n{title} " in before_models for title in ("data train", "data eval", "packing", "steps", "sample"))
    assert re.search(r"^verdict +the gradient of cross_entropy is [\d,]+ times smaller than", shown.out, re.MULTILINE)
    if sys.platform == "linux":
        memory = r"^peak memory +[\d.]+ GiB, of which this step added [\d.]+ GiB"
        assert re.search(memory + ("; the" if compiles else ", when nothing is"), shown.out, re.MULTILINE)


def test_check_shows_the_numbers_of_the_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_run(tmp_path)
    print_check(config)
    shown = capsys.readouterr().out
    session = session_of(tmp_path)
    loss = forward_backward(session).sums["loss"]
    norm = session.models.engine.gradient_norm()
    assert f"loss {loss:.4f}, gradient norm {norm:.4g}" in shown
    run("distill", tmp_path / "run.yaml", "train.steps=1")
    first = metrics(tmp_path / "out")[1]
    assert first["loss/total_nats_per_token"] == pytest.approx(loss)
    assert first["train/gradient_norm"] == pytest.approx(norm)


def test_check_says_that_a_run_would_continue_or_is_complete(tmp_path: Path) -> None:
    write_run(tmp_path)
    run("distill", tmp_path / "run.yaml")
    assert "complete" in run("check", tmp_path / "run.yaml").out
    shutil.rmtree(tmp_path / "out" / "model")
    assert "out: resumes from step-00000006" in run("check", tmp_path / "run.yaml").out
    (tmp_path / "train.jsonl").write_text('{"text": "other data"}\n')
    failed = run("check", tmp_path / "run.yaml", code=1)
    assert "error: data.train: the documents have changed since " in failed.err


def test_a_json_file_is_never_half_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_json("x.json", {"a": "ß"})
    with pytest.raises(TypeError):
        folder.write_json("x.json", {"a": torch.zeros(1)})
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == {"a": "ß"}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
