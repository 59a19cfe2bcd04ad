"""Multi-token prediction in complete runs: gradients, acceptance, checkpoints, the exported model, refusals.

`test_parity.py` compares layouts; `test_mtp.py` compares the depths with each document alone.

T tokens, V vocabulary.
"""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import slow
from kit.layout_runs import assert_same_weights, weights
from kit.mtp_cases import make
from kit.ranks import run_ranks
from kit.runs import (
    ROOT,
    forward_backward,
    metrics,
    refused,
    refused_runs,
    run,
    save_model,
    session_of,
    write_records,
    write_run,
)
from kit.tensors import assert_equal_tensors, tensors_in
from kit.toy_tokenizer import toy_tokenizer
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from stillhouse.checkpoint.checkpoint_folder import verified
from stillhouse.checkpoint.export_weights import save_from_checkpoint
from stillhouse.checkpoint.save import load_checkpoint, save_checkpoint
from stillhouse.config import ConfigError, load_config
from stillhouse.data import StepMicroBatches
from stillhouse.loops.session import Session
from stillhouse.models import Decoder
from stillhouse.models.mtp import MultiTokenDecoder, find_layers
from stillhouse.output.progress import Progress
from stillhouse.run.run import prepare
from stillhouse.run.setup import RunSetup

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight")


def write_cycles(folder: Path, **settings: Any) -> Any:
    """Write a run whose documents count in a circle, so that a small model learns to predict two tokens."""
    for name, starts in (("train.jsonl", range(40)), ("eval.jsonl", range(5))):
        texts = [" ".join(itertools.islice(itertools.cycle(WORDS), start % 8, start % 8 + 12)) for start in starts]
        write_records(folder / name, [{"text": text} for text in texts])
    for name, seed in (("student", 1), ("teacher", 2)):
        save_model(folder / name, "qwen3", seed=seed, text=WORDS)
    return write_run(folder, **settings)


# the loss and its gradient


def plain_loss(session: Session, of_student: bool) -> Tensor:
    """Return the first step's loss from plain logits, in float64."""
    config, student = session.models.student_config.mtp, session.models.student
    assert config is not None
    assert student.mtp is not None
    assert session.models.teacher is not None
    decoder = MultiTokenDecoder(student, student.mtp.model, verify=False)
    step = session.schedule.step_schedule.micro_batches(session.data.train, 0)
    total = torch.zeros((), dtype=torch.float64)
    for micro_batch in step:
        ids_BS, at_BS = micro_batch.input_ids_BS, micro_batch.position_ids_BS
        logits, labels_BS = decoder(ids_BS, at_BS), micro_batch.labels_T.view(ids_BS.shape)
        with torch.no_grad():
            teacher = session.models.teacher(ids_BS, at_BS).double()
        for depth, logits_BSV in enumerate(logits):
            target = logits[0].detach() if depth and of_student else teacher
            scale = config.scale if depth else 1.0
            for row, column in itertools.product(range(ids_BS.shape[0]), range(ids_BS.shape[1] - depth)):
                later = column + depth
                if at_BS[row, later] != at_BS[row, column] + depth or labels_BS[row, later] < 0:
                    continue  # another document, or no target
                log_p, log_q = target[row, later].log_softmax(-1), logits_BSV[row, column].double().log_softmax(-1)
                if depth and config.objective == "reverse_kl":
                    total = total + scale * (log_q.exp() * (log_q - log_p)).sum()
                    continue
                hard = -log_q[labels_BS[row, later]]
                total = total + scale * (0.4 * hard + 0.6 * (log_p.exp() * (log_p - log_q)).sum())
    return total / step.normalizer


@pytest.mark.parametrize(
    "mtp",
    [{"depths": 2, "scale": 0.7}, {"depths": 1, "signal": "student", "train": "heads", "objective": "reverse_kl"}],
)
def test_a_step_has_the_gradient_of_plain_logits(tmp_path: Path, mtp: dict[str, Any]) -> None:
    options = {"student.dtype": "float64", "objective.loss": "0.4*cross_entropy + 0.6*forward_kl"}
    session = session_of(tmp_path, family="qwen3", **options, **{"student.mtp": mtp})
    output = forward_backward(session)
    gradients = {name: parameter.grad for name, parameter in session.models.student.named_parameters()}
    session.models.engine.zero_grad()
    expected = plain_loss(session, mtp.get("signal") == "student")
    expected.backward()
    assert output.sums["loss"] == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in session.models.student.named_parameters():
        gradient, reference = gradients[name], parameter.grad
        if mtp.get("train") == "heads" and not name.startswith("mtp."):
            assert gradient is reference is None, name
            continue
        assert gradient is not None, name
        assert reference is not None, name
        assert float((gradient - reference).norm()) <= 1e-5 * float(reference.norm()), name


def test_several_teachers_and_another_objective_of_the_depths(tmp_path: Path) -> None:
    """The depths learn from the weighted teachers; equal teachers give the loss of one."""
    mtp = {"depths": 1, "objective": "reverse_kl", "scale": 0.5}
    one = session_of(tmp_path, family="qwen3", **{"student.mtp": mtp})
    model = str(tmp_path / "teacher")
    several = session_of(
        tmp_path,
        family="qwen3",
        teacher=False,
        **{
            "student.mtp": mtp,
            "objective.loss": "0.3*cross_entropy + 0.7*jsd(0.5)",
            "teachers": {"first": {"model": model, "weight": 3}, "second": {"model": model, "weight": 1}},
        },
    )
    expected, sums = (forward_backward(session).sums for session in (one, several))
    assert sums["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert sums["mtp_1/reverse_kl/first"] == pytest.approx(expected["mtp_1/reverse_kl"], rel=1e-5)


# evaluation


def test_acceptance_is_that_of_the_logits(tmp_path: Path) -> None:
    session = session_of(tmp_path, family="qwen3", **{"student.mtp": {"depths": 2}})
    assert session.data.evaluation is not None
    assert session.models.student.mtp is not None
    step = session.data.evaluation.micro_batches([[0, 1], [2]])
    sharded = session.models.shard(StepMicroBatches(list(step)), training=False)
    sums = session.models.engine.evaluate([(sharded, session.models.source.request(sharded).result())])
    decoder = MultiTokenDecoder(session.models.student, session.models.student.mtp.model, verify=False)
    for depth in (1, 2):
        tokens, greedy, sampled = 0, 0, 0.0
        for micro_batch in step:
            at_BS, labels_BS = micro_batch.position_ids_BS, micro_batch.labels_T.view(micro_batch.shape_BS)
            with torch.no_grad(), torch.device("cpu"):
                main, *drafts = decoder(micro_batch.input_ids_BS, at_BS)
            for row, column in itertools.product(*(range(size) for size in (len(at_BS), at_BS.shape[1] - depth))):
                later = column + depth
                if at_BS[row, later] != at_BS[row, column] + depth or labels_BS[row, later] < 0:
                    continue
                main_V, draft_V = main[row, later], drafts[depth - 1][row, column]
                tokens += 1
                greedy += int(main_V.argmax() == draft_V.argmax())
                sampled += float(torch.minimum(main_V.softmax(-1), draft_V.softmax(-1)).sum())
        assert sums[f"mtp_{depth}/tokens"] == tokens
        assert sums[f"mtp_{depth}/agreement"] == greedy
        assert tokens - sums[f"mtp_{depth}/total_variation"] == pytest.approx(sampled, rel=1e-4)


@pytest.mark.parametrize("train", ["all", slow("heads")])
def test_acceptance_rises(tmp_path: Path, train: str) -> None:
    """30 steps of a real run. With train=heads, the student has learnt the text before, with MTP layers untrained."""
    settings = {"train.steps": 30, "train.learning_rate": 1e-2, "eval.every": 30, "train.warmup": 0.1}
    mtp = {"depths": 1, "objective": "cross_entropy"}
    if train == "heads":
        config = write_cycles(tmp_path, **settings, **{"objective.loss": "cross_entropy", "out": str(tmp_path / "0")})
        run("distill", tmp_path / "run.yaml")
        settings["student.model"] = str(Path(config.out) / "model")
        mtp = {"train": "heads", "signal": "student", "objective": "forward_kl"}
    write_cycles(tmp_path, **settings, **{"student.mtp": mtp, "objective.loss": "cross_entropy"})
    command = run("distill", tmp_path / "run.yaml")
    assert "further token" in command.out.splitlines()[0]
    records = metrics(tmp_path / "out")
    first, *_, last = [line for line in records if "eval/mtp_1/acceptance" in line]
    assert first["eval/mtp_1/acceptance"] < 0.3
    assert last["eval/mtp_1/acceptance"] > 0.7
    assert last["eval/mtp_1/sampled_acceptance"] > first["eval/mtp_1/sampled_acceptance"] + 0.2
    steps = [line for line in records if "loss/total_nats_per_token" in line]
    term = "forward_kl" if train == "heads" else "cross_entropy"
    assert steps[-1][f"loss/mtp_1/{term}_nats_per_token"] < steps[0][f"loss/mtp_1/{term}_nats_per_token"]
    if train == "heads":
        before, after = load_file(Path(config.out) / "model" / "model.safetensors"), weights(tmp_path / "out")
        assert_equal_tensors({name: after[name] for name in before}, before)


# checkpoints and the exported model


@pytest.mark.parametrize("train", ["all", "heads"])
def test_a_checkpoint_restores_the_layers(tmp_path: Path, train: str) -> None:
    settings = {"family": "qwen3", "tied": True, "student.mtp": {"depths": 2, "train": train, "signal": "student"}}
    session = session_of(tmp_path, **settings)
    forward_backward(session)
    session.models.engine.update(1e-2)
    path = save_checkpoint(tmp_path / "saved", Progress(1), session.models.engine, session.data.tokenizer)
    again = session_of(tmp_path, **settings, seed=5)
    assert session.models.student.mtp is not None
    assert again.models.student.mtp is not None
    name = "layers.0.eh_proj.weight"
    assert not torch.equal(session.models.student.mtp.state_dict()[name], again.models.student.mtp.state_dict()[name])
    load_checkpoint(verified(path), again.models.engine)
    states = (session.models.engine.optimizer.state, again.models.engine.optimizer.state)
    students = [prepared.models.student.named_parameters() for prepared in (session, again)]
    for (name, one), (_, two) in zip(*students, strict=True):
        assert torch.equal(one, two), name
        assert (one in states[0]) == one.requires_grad == (train == "all" or name.startswith("mtp."))
        assert all(torch.equal(moment, states[1][two][key]) for key, moment in states[0].get(one, {}).items())


def test_the_exported_model_drafts_and_is_a_students_model_again(tmp_path: Path) -> None:
    settings = {"family": "qwen3", "student.mtp": {"depths": 2}, "train.steps": 2}
    config = write_run(tmp_path, **settings)
    checked = run("check", tmp_path / "run.yaml")
    assert "2 further tokens, 51,232 parameters, new; minimise 0.3 × " in checked.out
    run("distill", tmp_path / "run.yaml")
    folder = Path(config.out) / "model"
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert all(name.startswith(("model.layers.2.", "model.layers.3.")) for name in report["unexpected_keys"])

    prompt, options = torch.arange(5, 12)[None], {"max_new_tokens": 8, "eos_token_id": None, "do_sample": False}
    expected = model.generate(prompt, **options)
    find_layers(model)
    assert torch.equal(model.generate(prompt, use_mtp=True, **options), expected)

    exported, again = load_file(folder / "model.safetensors"), tmp_path / "again"
    again.mkdir()
    session = session_of(again, **settings, **{"student.model": str(folder)})
    assert session.models.student.mtp is not None
    assert not session.models.student.mtp.is_new
    loaded = MultiTokenDecoder.from_pretrained(folder).main
    for mtp, pretrained in ((session.models.student.mtp, session.models.student.pretrained), (loaded.mtp, model)):
        tensors = mtp.checkpoint_tensors(pretrained)
        assert tensors
        assert_equal_tensors(tensors, {name: exported[name] for name in tensors})
    for key, mtp in (("student.mtp.depths", {"depths": 1}), (None, {"depths": 1, "init": "new"})):
        config = write_run(again, **settings | {"student.mtp": mtp, "student.model": str(folder)})
        if key is None:
            assert prepare(config, announce=False).models.student.mtp.is_new
        else:
            with pytest.raises(ConfigError, match=r"student\.mtp\.depths: got 1, .*=2: expected 2, or"):
                prepare(config, announce=False)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "qwen3"])
def test_layers_of_a_checkpoint_are_read_and_written(tmp_path: Path, family: str) -> None:
    """Also where a file has one tensor per expert; and written from a checkpoint's tensors, as under a layout."""
    tokenizer = toy_tokenizer()
    model = make(family, 2, vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "student")
    tokenizer.save_pretrained(tmp_path / "student")
    session = session_of(tmp_path, **{"student.mtp": {"depths": 2}})
    assert session.models.student.mtp is not None
    assert not session.models.student.mtp.is_new
    state = session.models.student.mtp.layers.state_dict()
    assert_equal_tensors(state, model.layers.state_dict())
    path = save_checkpoint(tmp_path / "saved", Progress(), session.models.engine, session.data.tokenizer)
    (tmp_path / "written").mkdir()
    save_from_checkpoint(tmp_path / "written", session.models.student, path / "resume")
    assert_equal_tensors(*(tensors_in(tmp_path / name) for name in ("written", "student")))


def test_a_checkpoint_that_lacks_its_layers_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "student", "qwen3", change=lambda model: setattr(model.config, "num_mtp_layers", 1))
    config = write_run(tmp_path, **{"student.mtp": {}})
    with pytest.raises(ValueError, match=r"has no tensor 'model\.layers\.2\.enorm\.weight'"):
        prepare(config, announce=False)


# refusals


@pytest.mark.parametrize(("settings", "key", "text"), refused_runs("multi-token prediction"))
def test_what_is_not_supported_is_refused(tmp_path: Path, settings: dict[str, Any], key: str, text: str) -> None:
    with refused(key, text):
        prepare(write_run(tmp_path, **{"family": "qwen3", "student.mtp": {}} | settings), announce=False)


def test_a_divergence_of_the_depths_needs_no_teacher_but_the_student(tmp_path: Path) -> None:
    mtp = {"objective": "forward_kl", "signal": "student"}
    session = session_of(tmp_path, teacher=False, **{"student.mtp": mtp})
    assert not session.models.engine.needs_teacher
    assert forward_backward(session).sums["mtp_1/forward_kl"] > 0


def test_the_configurations_of_the_page_and_the_example_load(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "mtp.md").read_text()
    shown = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    assert len(shown) == 2
    for text in shown:
        (tmp_path / "run.yaml").write_text(text)
        config = load_config(tmp_path / "run.yaml", settings={"data": {"train": "x"}, "out": "y"})
        assert config.student.mtp is not None
        assert "student.mtp" in [part.key for part in RunSetup(config).objective.parts]
    mtp = load_config(ROOT / "examples" / "qwen3_mtp.yaml").student.mtp
    assert mtp is not None
    assert mtp.scale == 0.3


# layouts


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "tied"), [("fsdp=2", True), ("tensor=2", False), ("pipeline=2", True)])
def test_a_run_under_a_layout_gives_the_model_of_one_process(tmp_path: Path, layout: str, tied: bool) -> None:
    """New layers are drawn equal; the exported file has the same tensors; a resumed run ends with the same bits."""
    settings = {"student.mtp": {"depths": 2}, "checkpoint.every": 3, "checkpoint.keep": 9, "eval.every": 3}
    write_run(tmp_path, family="qwen3", tied=tied, **settings)
    run("distill", tmp_path / "run.yaml")
    resume = tmp_path / "layout" / "checkpoints" / "step-00000003"
    for out, *more in (("layout",), ("resumed", f"checkpoint.resume={resume}")):
        run_ranks(2, "distill", tmp_path / "run.yaml", f"out={tmp_path / out}", f"parallel.{layout}", *more)
    assert_equal_tensors(weights(tmp_path / "resumed"), weights(tmp_path / "layout"))
    assert_same_weights(tmp_path / "layout", tmp_path / "out")
    config, other = ((tmp_path / out / "model" / "config.json").read_text() for out in ("out", "layout"))
    assert config == other
    runs = [metrics(tmp_path / out) for out in ("out", "layout")]
    figures = [[line for line in lines if "eval/mtp_2/acceptance" in line] for lines in runs]
    for expected, evaluation in zip(*figures, strict=True):
        for key in (key for key in expected if key.startswith("eval/mtp_")):
            assert evaluation[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-3), key
    Decoder.from_pretrained(tmp_path / "layout" / "model")
