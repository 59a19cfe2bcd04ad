"""`stillhouse export` writes the student of any checkpoint as transformers and peft read it, with a model card."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from kit import slow
from kit.layout_runs import distill
from kit.runs import Command, contents, run, save_model, session_of, write_run, write_texts
from kit.tensors import assert_equal_tensors, tensors_in
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from stillhouse.checkpoint.save import save_checkpoint
from stillhouse.libraries import is_supported
from stillhouse.output.progress import Progress
from stillhouse.tools.export_run import ExportSettings, export_run
from stillhouse.tools.write_cache import write_cache

IDS = torch.arange(3, 35)[None]
STEP = "checkpoints/step-00000004"
PLAIN = ExportSettings(card=False)
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run of a student with a chat template and a licensed card, with all its checkpoints."""
    folder = tmp_path_factory.mktemp("export")
    save_model(folder / "student", tied=True, seed=1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "student")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "student")
    (folder / "student" / "README.md").write_text("---\nlicense: mit\n---\n\nA student.\n")
    write_run(folder, **{"train.steps": 4, "checkpoint.every": 2, "checkpoint.keep": 9})
    run("distill", folder / "run.yaml")
    return folder


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model.eval()(IDS).logits


def test_a_run_is_exported_with_everything_that_transformers_reads(trained: Path, tmp_path: Path) -> None:
    ended = run("export", trained / "out", "--out", tmp_path / "made")
    assert ended.out == f"exported step 4 to {tmp_path / 'made'}\n"
    files, model = contents(tmp_path / "made"), contents(trained / "out" / "model")
    assert files.keys() - model.keys() == {"README.md"}
    assert {name: files[name] for name in model} == model
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    assert tokenizer.chat_template == TEMPLATE
    assert "generation_config.json" in files


@pytest.mark.parametrize(("step", "number"), [("2", 2), ("last", 4), ("best", 4), (None, 4)])
def test_a_step_is_chosen(trained: Path, tmp_path: Path, step: str | None, number: int) -> None:
    out = trained / "out"
    checkpoint = export_run(out, tmp_path / "made", step, PLAIN)
    assert checkpoint.path == out / "checkpoints" / f"step-{number:08d}"
    assert_equal_tensors(tensors_in(tmp_path / "made"), tensors_in(checkpoint.path / "student"))


@pytest.mark.parametrize(
    ("family", "tied"),
    [("llama", True), ("llama", False), ("qwen3", False), ("qwen3_moe", False), ("gemma3", True), ("gpt2", True)],
)
def test_the_logits_are_the_trained_students(tmp_path: Path, family: str, tied: bool) -> None:
    """In float32 to the bit; in bfloat16 every weight is the rounded one, in files of at most 40 kB with an index."""
    session = session_of(tmp_path, family=family, tied=tied)
    with torch.no_grad():
        for parameter in session.models.student.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    path = save_checkpoint(tmp_path / "saved", Progress(1), session.models.engine, session.data.tokenizer)
    export_run(path, tmp_path / "made", None, PLAIN)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "made", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    trained = session.models.student.pretrained
    assert torch.equal(logits(model), logits(trained))
    small = ExportSettings(dtype="bfloat16", shard_bytes=40_000, card=False)
    export_run(path, tmp_path / "half", None, small)
    assert len(list((tmp_path / "half").glob("*.safetensors"))) > 1
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert half.dtype == torch.bfloat16
    for (name, one), (other, two) in zip(half.named_parameters(), trained.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(one, two.bfloat16()), name
    names = set(tensors_in(tmp_path / "made"))
    assert set(tensors_in(tmp_path / "half")) == names
    assert ("lm_head.weight" in names) != tied


def test_the_card_states_where_the_student_is_from(trained: Path, tmp_path: Path) -> None:
    run("export", trained / "out", "--step", "2", "--dtype", "bfloat16", "--out", tmp_path / "made")
    card = ModelCard.load(tmp_path / "made" / "README.md")
    assert card.data.license == "mit"
    assert card.data.library_name == "transformers"
    state = json.loads((trained / "out" / "checkpoints" / "step-00000002" / "state.json").read_text())["progress"]
    counts = json.loads((trained / "out" / "data.json").read_text())["train"]
    log = [json.loads(line) for line in (trained / "out" / "metrics.jsonl").read_text().splitlines()]
    first = next(line for line in log if line["step"] == 0)["eval/forward_kl"]
    for text in (
        "Objective: minimise 0.3 × cross-entropy + 0.7 × jsd(0.5)",
        f"| teacher | teacher | `{state['models']['teacher'][:16]}` |",
        f"| student before training | student | `{state['models']['student'][:16]}` |",
        f"{counts['records']} documents, {counts['tokens']:,} tokens | `{state['data']['train'][:16]}` |",
        f"2 optimizer steps of at most 128 tokens; {state['tokens']:,} target tokens in all",
        f"| eval/forward_kl | {first:.4f} | {state['metrics']['eval/forward_kl']:.4f} |",
        "| held-out metric | step 0 | step 2 |",
        "The weights in this folder are bfloat16. Chat template: the student's own.",
        "Layout: 1 process.",
        "stillhouse export out --step 2 --dtype bfloat16 --out FOLDER",
    ):
        assert text in card.text, text
    assert str(trained) not in card.content


def test_the_card_of_a_run_with_several_sets_has_their_metrics_without_their_counts(tmp_path: Path) -> None:
    write_run(tmp_path)
    sources = [{"source": str(tmp_path / "train.jsonl")}, {"source": str(tmp_path / "other.jsonl"), "weight": 2.0}]
    write_texts(tmp_path / "other.jsonl", 5, 9)
    sets = {"a": str(tmp_path / "eval.jsonl"), "b": str(tmp_path / "other.jsonl")}
    write_run(tmp_path, **{"data.train": sources, "data.eval": sets, "train.steps": 1})
    run("distill", tmp_path / "run.yaml")
    export_run(tmp_path / "out", tmp_path / "made", None, ExportSettings())
    card = (tmp_path / "made" / "README.md").read_text()
    rows = {line.split()[1] for line in card.splitlines() if line.startswith("| eval/")}
    assert rows >= {"eval/cross_entropy", "eval/a/cross_entropy", "eval/b/agreement"}
    assert not any("tokens" in row for row in rows)


def test_the_command_in_the_card_can_be_pasted(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained.parent)
    run("export", f"{trained.name}/out", "--out", tmp_path / "made")
    assert (
        f"    stillhouse export {trained.name}/out --step 4 --out FOLDER\n"
        in (tmp_path / "made/README.md").read_text()
    )


def test_the_objective_in_the_card_is_that_of_the_configuration(trained: Path, tmp_path: Path) -> None:
    """Whatever environment.json says; with a cache, whose signal is only known from there, it must fit."""
    shutil.copytree(trained / "out", tmp_path / "run")
    path = tmp_path / "run" / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"objective": "minimise reverse_kl, over all"}))
    for out, made in ((trained / "out", "one"), (tmp_path / "run", "other")):
        export_run(out, tmp_path / made, None, ExportSettings())
    one, other = ((tmp_path / made / "README.md").read_text() for made in ("one", "other"))
    assert other.replace("stillhouse export run", "stillhouse export out") == one
    folder = tmp_path / "cached"
    folder.mkdir()
    config = write_run(folder, **{"train.steps": 1})
    write_cache(config, folder / "cache", "top_k", top_k=4)
    write_run(folder, cached=True, **{"train.steps": 1, "teacher.cache": str(folder / "cache")})
    run("distill", folder / "run.yaml")
    export_run(folder / "out", folder / "made", None, ExportSettings())
    assert "over top 4" in (folder / "made" / "README.md").read_text()
    shutil.copyfile(path, folder / "out" / "environment.json")
    with pytest.raises(ValueError, match=r"environment\.json has the objective 'minimise reverse_kl, over all'"):
        export_run(folder / "out", folder / "again", None, ExportSettings())


def replaced(name: str, text: str) -> Callable[[Path], object]:
    return lambda out: (out / name).write_text(text)


def with_another_number(out: Path) -> None:
    path = out / STEP / "student" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\1")


def with_another_rate(out: Path) -> None:
    path = out / "config.yaml"
    path.write_text(path.read_text().replace("learning_rate: 0.001", "learning_rate: 0.002"))


#: for each damage: the problem, and whether only the card needs what is damaged
DAMAGE: dict[str, tuple[Callable[[Path], object], str, bool]] = {
    "weights": (with_another_number, "student/model.safetensors is not what was written", False),
    "optimizer": (lambda out: next((out / STEP / "resume").glob("*.safetensors")).unlink(), "is lost", False),
    "configuration": (with_another_rate, "is not the configuration that step-00000004 was trained with", True),
    "log": (replaced("metrics.jsonl", "{}\n"), "does not begin with the lines that it had when step 4", True),
    "counts": (replaced("data.json", '{"train": {"documents": "many"}}'), "cannot be read; restore it", True),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_by_name(trained: Path, tmp_path: Path, damage: str) -> None:
    do, problem, is_of_card = DAMAGE[damage]
    out = Path(shutil.copytree(trained / "out", tmp_path / "run"))
    do(out)
    with pytest.raises(ValueError, match=problem):
        export_run(out, tmp_path / "made", None, ExportSettings())
    assert not (tmp_path / "made").exists()
    if is_of_card:
        export_run(out, tmp_path / "made", None, PLAIN)


def test_a_wrong_place_is_refused(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    moved = Path(shutil.copytree(trained / "out" / STEP, tmp_path / "step-00000004"))
    made, step_message = tmp_path / "made", r"--step: got 3, expected best, last or one of the steps .*: 2, 4"
    for source, target, step, settings, message in (
        (trained, made, None, PLAIN, "is neither a run nor a checkpoint"),
        (trained / "out", made, "3", PLAIN, step_message),
        (trained / "out", made, None, ExportSettings(merge=True), "has no adapter: expected neither --merge nor"),
        (trained / "out", tmp_path / "full", None, PLAIN, "exists and is not empty"),
        (moved, made, None, ExportSettings(), "is not in the folder of its run"),
    ):
        with pytest.raises(ValueError, match=message):
            export_run(source, target, step, settings)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]
    export_run(moved, made, None, PLAIN)
    assert contents(made) == contents(trained / "out" / "model")


def test_nothing_beside_the_new_folder_is_removed(trained: Path, tmp_path: Path) -> None:
    """The temporary folder's name may be in use, and `out` may be a link to an empty folder."""
    other = tmp_path / "made.partial"
    other.mkdir()
    (other / "mine").touch()
    with pytest.raises(ValueError, match=r"made\.partial exists: another process is writing to it"):
        export_run(trained / "out", tmp_path / "made", None, PLAIN)
    assert [path.name for path in other.iterdir()] == ["mine"]
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    export_run(trained / "out", tmp_path / "link", None, PLAIN)
    assert contents(tmp_path / "disk") == contents(trained / "out" / "model")


def test_only_the_files_of_the_checkpoint_are_exported(trained: Path, tmp_path: Path) -> None:
    """A chat template that somebody put beside the student's files is not the student's."""
    checkpoint = tmp_path / "step-00000004"
    shutil.copytree(trained / "out" / "checkpoints" / "step-00000004", checkpoint)
    (checkpoint / "student" / "generation.py").write_text("another")
    (checkpoint / "student" / "additional_chat_templates").mkdir()
    (checkpoint / "student" / "additional_chat_templates" / "tool_use.jinja").write_text("another")
    export_run(checkpoint, tmp_path / "made", None, PLAIN)
    assert contents(tmp_path / "made") == contents(trained / "out" / "model")


@pytest.mark.parametrize("lost", ["student/model.safetensors", ""])
def test_a_checkpoint_that_is_removed_meanwhile_is_refused(trained: Path, tmp_path: Path, lost: str) -> None:
    """Its run removes it between the check of the hashes and the copy."""
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000004"
    shutil.copytree(trained / "out", tmp_path / "run")
    hook = (str(checkpoint / lost),)
    command = Command(
        "export", tmp_path / "run", "--out", tmp_path / "made", hook=removed_after_the_check, hook_arguments=hook
    )
    assert command.wait() == 1
    assert command.err == (
        f"error: {checkpoint} was removed while it was exported, because a run keeps only the newest "
        "checkpoint.keep checkpoints: expected a later --step, or a larger checkpoint.keep\n"
    )
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / "made.partial").exists()


def removed_after_the_check(path: str) -> None:
    """Remove a file or a folder when the export creates its temporary folder."""

    def remove(event: str, arguments: Any) -> None:
        if event == "os.mkdir" and str(arguments[0]).endswith("made.partial"):
            shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink()

    sys.addaudithook(remove)


def test_weights_beyond_float16_are_refused(tmp_path: Path) -> None:
    session = session_of(tmp_path)
    with torch.no_grad():
        session.models.student.head.linear.weight[0, 0] = 1e6
    path = save_checkpoint(tmp_path / "saved", Progress(1), session.models.engine, session.data.tokenizer)
    with pytest.raises(ValueError, match=r"--dtype: torch.float16 cannot represent 'lm_head.weight'"):
        export_run(path, tmp_path / "large", None, ExportSettings(dtype="float16", card=False))
    assert not list(tmp_path.glob("large*"))


@pytest.mark.parametrize("family", ["llama", slow("gpt2")])
def test_an_adapter_is_merged_or_alone(tmp_path: Path, family: str) -> None:
    lora = {"student.adapter": {"r": 4, "alpha": 8}, "train.learning_rate": 1e-2, "train.steps": 2}
    write_run(tmp_path, family=family, **lora)
    run("distill", tmp_path / "run.yaml")
    export_run(tmp_path / "out", tmp_path / "alone", None, ExportSettings(merge=False))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "student")
    plain = tensors_in(tmp_path / "student")
    adapter = PeftModel.from_pretrained(base, tmp_path / "alone")
    expected = logits(adapter)
    assert ModelCard.load(tmp_path / "alone" / "README.md").data.library_name == "peft"
    export_run(tmp_path / "out", tmp_path / "merged", None, ExportSettings())
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert (merged - expected).abs().max() <= 1e-5 * expected.abs().max()
    export_run(tmp_path / "out", tmp_path / "half", None, ExportSettings(dtype="bfloat16"))
    lora_of = {name: weight.float() for name, weight in tensors_in(tmp_path / "alone").items()}
    changed = 0
    for name, tensor in tensors_in(tmp_path / "half").items():
        part = f"base_model.model.{name.removesuffix('.weight')}"
        weight = plain[name]
        if f"{part}.lora_A.weight" in lora_of:
            delta = 8 / 4 * lora_of[f"{part}.lora_B.weight"] @ lora_of[f"{part}.lora_A.weight"]
            weight = weight + (delta.T if family == "gpt2" else delta)
            changed += 1
        assert (tensor.float() - weight).abs().max() <= 2**-8 * weight.abs().max(), name
        assert tensor.dtype == torch.bfloat16
    assert changed == len(lora_of) / 2
    (tmp_path / "student" / "config.json").write_text((tmp_path / "student" / "config.json").read_text() + " ")
    for merge in (True, False):
        with pytest.raises(ValueError, match=r"student: the files of .* are not those that the adapter in"):
            export_run(tmp_path / "out", tmp_path / "changed", None, ExportSettings(merge=merge))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp=2", "tensor=2", "pipeline=2"])
def test_a_checkpoint_of_any_layout(tmp_path: Path, layout: str) -> None:
    """The exported weights are those of the sharded checkpoint to the bit, and the card names the processes."""
    write_run(tmp_path, tied=True, **{"train.steps": 2})
    distill(tmp_path, "out", 2, f"parallel.{layout}")
    export_run(tmp_path / "out", tmp_path / "made", None, ExportSettings())
    assert contents(tmp_path / "out" / "model").items() <= contents(tmp_path / "made").items()
    text = (tmp_path / "made" / "README.md").read_text()
    assert f"Layout: 2 processes ({layout.replace('=', ' ')})." in text
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert logits(model).isfinite().all()


@pytest.mark.skipif(not is_supported("multi-token prediction"), reason="needs a later transformers")
def test_a_student_with_mtp_layers_is_exported_with_or_without_them(trained: Path, tmp_path: Path) -> None:
    """Servers refuse weights of layers that they do not know in the student's family."""
    write_run(tmp_path, family="qwen3", **{"train.steps": 2, "student.mtp": {"depths": 2}})
    run("distill", tmp_path / "run.yaml")
    run("export", tmp_path / "out", "--out", tmp_path / "with")
    run("export", tmp_path / "out", "--no-mtp", "--dtype", "float32", "--out", tmp_path / "without")
    tensors, rest = (tensors_in(tmp_path / name) for name in ("with", "without"))
    layers = json.loads((tmp_path / "with" / "config.json").read_text())["num_hidden_layers"]
    of_mtp = {name for name in tensors if name.startswith((f"model.layers.{layers}.", f"model.layers.{layers + 1}."))}
    assert len({name.split(".")[2] for name in of_mtp}) == 2
    assert_equal_tensors(rest, {name: tensor for name, tensor in tensors.items() if name not in of_mtp})
    config = json.loads((tmp_path / "without" / "config.json").read_text())
    assert config["num_mtp_layers"] == 0
    assert "mtp_layer_types" not in config
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("with", "without")]
    assert torch.equal(*map(logits, models))
    assert "--no-mtp" in (tmp_path / "without" / "README.md").read_text()
    with pytest.raises(ValueError, match=r"^--no-mtp: the student of .* has no MTP layers"):
        export_run(trained / "out", tmp_path / "other", None, ExportSettings(mtp=False))
