"""Checkpoints that are damaged, exchanged or incomplete: an error names them, and a run resumes from an older one."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit import slow
from kit.damaged_checkpoints import BEFORE, NEWEST, interrupted, zeroed
from kit.ranks import Ranks, run_ranks
from kit.runs import contents, run, save_model, write_run
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from stillhouse.checkpoint import checkpoint_folder
from stillhouse.checkpoint.checkpoint_folder import require_covered, verified
from stillhouse.hashing import json_hash
from stillhouse.output.progress import DamagedCheckpointError, State, write_state
from stillhouse.tools.verify import verify_run

#: a run of two ranks: its folder, and the override of its layout
OnTwo = tuple[Path, str]
Damage = Callable[[Path], str]


def distill_on_two(folder: Path, out: Path, *overrides: str) -> Ranks:
    ranks = Ranks(2, "distill", folder / "run.yaml", f"out={out}", *overrides)
    ranks.wait()
    return ranks


def lost(resume: Path) -> str:
    (resume / second(resume)).unlink()
    return "is lost"


def stale(resume: Path) -> str:
    shutil.copy(resume.parents[1] / BEFORE / "resume" / second(resume), resume / second(resume))
    return "is not what was written"


def second(resume: Path) -> str:
    """The file of rank 1."""
    (name,) = (path.name for path in resume.glob("shard-00002-*"))
    return name


ONE_RANK = [("fsdp", stale), slow("fsdp", lost), slow("pipeline", lost)]


@pytest.mark.parametrize(("run_on_two", "damage"), ONE_RANK, indirect=["run_on_two"])
def test_a_damaged_file_of_one_rank_is_named(run_on_two: OnTwo, tmp_path: Path, damage: Damage) -> None:
    folder, override = run_on_two
    out = interrupted(folder, tmp_path)
    resume = out / "checkpoints" / NEWEST / "resume"
    name, problem = second(resume), damage(resume)
    before = contents(out)
    refused = distill_on_two(folder, out, override)
    assert [command.process.exitcode for command in refused] == [1, 1]
    for command, prefix in zip(refused, ("error: ", "error on rank 1: "), strict=True):
        assert command.err == (
            f"{prefix}{out}/checkpoints/{NEWEST} is damaged: resume/{name} {problem}"
            f"{' (its hash differs)' if damage is stale else ''}; with checkpoint.fallback=true the run continues "
            f"from {BEFORE}, the checkpoint before it\n"
        )
    assert contents(out) == before
    resumed = distill_on_two(folder, out, override, "checkpoint.fallback=true")
    assert [command.process.exitcode for command in resumed] == [0, 0], resumed.texts
    assert f"resuming from {out}/checkpoints/{BEFORE}\n" in resumed[0].out
    assert contents(out / "model") == contents(folder / "out" / "model")
    assert (out / "checkpoints" / f"{NEWEST}.damaged").is_dir()


def without_moments(newest: Path) -> str:
    path = next((newest / "resume").glob("*.safetensors"))
    save_file({name: tensor for name, tensor in load_file(path).items() if "exp_avg" not in name}, path)
    return f"resume/{path.name} is not what was written (its hash differs)"


def one_too_many(newest: Path) -> str:
    shutil.copy(next((newest / "resume").glob("*.safetensors")), newest / "resume" / "other.safetensors")
    return "resume/other.safetensors does not belong to it"


def edited_step(newest: Path) -> str:
    text = (newest / "state.json").read_text()
    assert '"step": 4' in text
    (newest / "state.json").write_text(text.replace('"step": 4', '"step": 5'))
    return "its state.json is not what was written (its hash differs)"


def of_another_step(newest: Path) -> str:
    shutil.copy(newest.parent / BEFORE / "state.json", newest / "state.json")
    return "is the checkpoint of step 2: expected the name step-00000002"


def text_as_step(newest: Path) -> str:
    """As another version of the package could write it, with the right hash."""
    content = json.loads((newest / "state.json").read_text())
    del content["sha256"]
    content["progress"]["step"] = "4"
    (newest / "state.json").write_text(json.dumps(content | {"sha256": json_hash(content)}))
    return "is of another version: state.json: progress.step: Input should be a valid integer"


#: changes of a checkpoint, and contents of its state.json
DAMAGE: list[Callable[[Path], str] | str] = [
    *(zeroed, without_moments, one_too_many, edited_step, of_another_step, text_as_step),
    *('{"progress": {"st', "", "[1, 2]", '{"step": 4, "tokens": 1}'),
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_within_a_checkpoint_is_found(complete_run: Path, tmp_path: Path, damage: Damage | str) -> None:
    newest = Path(shutil.copytree(complete_run / "out" / "checkpoints" / NEWEST, tmp_path / NEWEST))
    shutil.copytree(complete_run / "out" / "checkpoints" / BEFORE, tmp_path / BEFORE)
    problem = "its state.json "
    if isinstance(damage, str):
        (newest / "state.json").write_text(damage)
    else:
        problem = damage(newest)
    with pytest.raises(DamagedCheckpointError, match=f"^{re.escape(str(newest))} .*{re.escape(problem)}"):
        verified(newest)


def test_an_older_damaged_checkpoint_is_a_warning_and_is_kept(complete_run: Path, tmp_path: Path) -> None:
    """A damaged checkpoint is not the best one and is not removed, and the run does not stop."""
    out = interrupted(complete_run, tmp_path)
    (out / "checkpoints" / BEFORE / "state.json").write_text("{")
    ended = run("distill", complete_run / "run.yaml", f"out={out}", "checkpoint.keep=1")
    assert f"warning: {out}/checkpoints/{BEFORE} is damaged: its state.json cannot be read" in ended.out
    assert (out / "checkpoints" / BEFORE).is_dir()
    assert contents(out / "model") == contents(complete_run / "out" / "model")


def test_chunks_cover_a_tensor_once() -> None:
    """In the second case, overlap and gap have the same size, so the number of elements is right."""

    def stored(*starts: int) -> dict[str, TensorStorageMetadata]:
        chunks = [ChunkStorageMetadata(torch.Size([at, 0]), torch.Size([4, 3])) for at in starts]
        return {"w": TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([12, 3]), chunks)}

    require_covered(Path("checkpoint"), stored(0, 4, 8))
    for starts, problem in (
        ((0, 4), "24 of 36"),
        ((0, 4, 6), "36 of 36 elements, and overlap"),
        ((0, 4, 8, 0), "48"),
    ):
        with pytest.raises(DamagedCheckpointError, match=f"chunks of 'w' hold {problem}"):
            require_covered(Path("checkpoint"), stored(*starts))


def test_moments_that_are_absent_though_all_hashes_are_right(complete_run: Path, tmp_path: Path) -> None:
    """Only the parameters that the state lists may lack optimizer state."""
    out = interrupted(complete_run, tmp_path)
    newest = out / "checkpoints" / NEWEST
    path = next((newest / "resume").glob("*.safetensors"))
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    kept = {name: tensor for name, tensor in load_file(path).items() if "norm.weight.exp_avg" not in name}
    save_file(kept, path, metadata=header)
    state = checkpoint_folder.read_state(newest)
    state.files[f"resume/{path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    write_state(newest, state)
    refused = run("distill", complete_run / "run.yaml", f"out={out}", code=1)
    assert "does not fit this student: 'optimizer.state." in refused.err
    assert "is absent in the checkpoint" in refused.err


def test_a_checkpoint_given_by_its_path_is_verified_too(complete_run: Path, tmp_path: Path) -> None:
    out = interrupted(complete_run, tmp_path)
    zeroed(out / "checkpoints" / NEWEST)
    resume = f"checkpoint.resume={out}/checkpoints/{NEWEST}"
    refused = run("distill", complete_run / "run.yaml", resume, f"out={tmp_path}/other", code=1)
    assert "is not what was written (its hash differs); name another checkpoint as checkpoint.resume" in refused.err
    assert not (tmp_path / "other" / "config.yaml").exists()


@pytest.mark.parametrize("which", ["student", *(slow(name) for name in ("teacher", "base of an adapter"))])
def test_a_model_that_was_replaced(tmp_path: Path, which: str) -> None:
    """Another model under the same path and with the same shapes."""
    adapter = {"student.adapter": {"r": 4}} if which == "base of an adapter" else {}
    write_run(tmp_path, **{"checkpoint.every": 2, "checkpoint.keep": 9}, **adapter)
    run("distill", tmp_path / "run.yaml")
    out = interrupted(tmp_path, tmp_path / "half")
    name, family = ("teacher", "qwen3") if which == "teacher" else ("student", "llama")
    shutil.rmtree(tmp_path / name)
    save_model(tmp_path / name, family, seed=7)
    before = contents(out)
    refused = run("distill", tmp_path / "run.yaml", f"out={out}", code=1)
    assert f"error: {name}: the files have changed since {out}/checkpoints/{NEWEST} was written" in refused.err
    assert contents(out) == before
    assert name in run("check", tmp_path / "run.yaml", f"out={out}", code=1).err


@pytest.mark.parametrize("processes", [1, 2])
def test_weights_are_checked_before_they_are_saved(tmp_path: Path, processes: int) -> None:
    write_run(tmp_path)
    huge_update = "train.learning_rate=1e308", "train.warmup=0", "checkpoint.every=1"
    ranks = Ranks(processes, "distill", tmp_path / "run.yaml", *huge_update)
    assert ranks.wait() == [1] * processes
    assert ranks[0].err.startswith("error: step 1: 'student.backbone.")
    assert "not finite after the update, so no checkpoint of this step is written" in ranks[0].err
    assert list((tmp_path / "out" / "checkpoints").iterdir()) == []


def test_a_log_that_is_not_the_one_of_the_checkpoint(complete_run: Path, tmp_path: Path) -> None:
    for damage in ("lost", "edited"):
        out = interrupted(complete_run, tmp_path / damage)
        log = out / "metrics.jsonl"
        text = log.read_text()
        log.unlink()
        if damage == "edited":
            log.write_text(text.replace('"step": 2,', '"step": 3,', 1))
        refused = run("distill", complete_run / "run.yaml", f"out={out}", code=1)
        assert f"error: {log} is damaged: its first " in refused.err
        run("distill", complete_run / "run.yaml", f"out={out}/again", f"checkpoint.resume={out}/checkpoints/{NEWEST}")
        assert contents(out / "again" / "model") == contents(complete_run / "out" / "model")


def test_the_model_of_a_complete_run_is_verified(complete_run: Path, tmp_path: Path) -> None:
    """Exit code 0 means that the model is there, so it must be the model that was written."""
    out = tmp_path / "out"
    shutil.copytree(complete_run / "out", out)
    weights = out / "model" / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-9] ^= 1
    weights.write_bytes(raw)
    refused = run("distill", complete_run / "run.yaml", f"out={out}", code=1)
    problem = "these files do not match their hashes: model/model.safetensors; remove that"
    assert f"error: {out}/model is damaged: {problem}" in refused.err
    shutil.rmtree(out / "model")
    run("distill", complete_run / "run.yaml", f"out={out}")
    assert contents(out / "model") == contents(complete_run / "out" / "model")
    (out / "hashes.json").unlink()
    assert "(not compared: there is no hashes.json)" in run("distill", complete_run / "run.yaml", f"out={out}").out


VERIFIED = ["config.yaml", BEFORE, NEWEST, "step-00000006", "metrics.jsonl", "model"]


def test_verify_says_what_is_wrong(complete_run: Path, tmp_path: Path) -> None:
    rows = run("verify", complete_run / "out").out.splitlines()
    assert [row.split()[:2] for row in rows] == [[name, "ok"] for name in VERIFIED]
    assert "steps 1 to 6, each once; 4 evaluations" in rows[4]
    out = Path(shutil.copytree(complete_run / "out", tmp_path / "out"))
    for name, change in {
        f"checkpoints/{NEWEST}/student/model.safetensors": NEWEST,
        f"checkpoints/{BEFORE}/state.json": BEFORE,
        "model/config.json": "model",
        "metrics.jsonl": "metrics.jsonl",
        "config.yaml": "config.yaml",
    }.items():
        content = (out / name).read_bytes()
        middle = len(content) // 2
        (out / name).write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        assert [finding.part for finding in verify_run(out) if finding.problem is not None] == [change]
        (out / name).write_bytes(content)
    (out / "model" / "config.json").unlink()
    failed = run("verify", out, code=1)
    assert [row.split()[0] for row in failed.out.splitlines() if " WRONG " in row] == ["model"]
    assert failed.err == f"error: {out}: 1 of 6 parts are wrong: model\n"


def test_verify_counts_steps(complete_run: Path, tmp_path: Path) -> None:
    out = interrupted(complete_run, tmp_path)
    shutil.rmtree(out / "checkpoints")
    log = out / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    for changed, problem in (([*lines, lines[-2]], "repeats step"), (lines[:2] + lines[3:], "steps from 1 to 6")):
        log.write_text("".join(changed))
        assert any(problem in str(finding) for finding in verify_run(out))
    with pytest.raises(ValueError, match="contains no run"):
        list(verify_run(tmp_path))


def other_state(rank: int) -> None:
    """One rank cannot read the newest checkpoint, but the others can."""
    if int(os.environ["RANK"]) != rank:
        return
    original = checkpoint_folder.read_state

    def read(path: Path) -> State:
        if path.name == NEWEST:
            raise DamagedCheckpointError(f"{path} is damaged: stale file handle")
        return original(path)

    checkpoint_folder.read_state = read


@pytest.mark.parametrize(
    ("run_on_two", "rank"), [("fsdp", 1), *map(slow, ("fsdp", "pipeline"), (0, 0))], indirect=["run_on_two"]
)
def test_damage_that_one_rank_finds_stops_all(run_on_two: tuple[Path, str], tmp_path: Path, rank: int) -> None:
    """No rank resumes from another checkpoint than the others."""
    folder, override = run_on_two
    out = interrupted(folder, tmp_path)
    arguments = ["distill", folder / "run.yaml", f"out={out}", override]
    refused = Ranks(2, *arguments, hook=other_state, hook_arguments=(rank,))
    assert refused.wait() == [1, 1]
    assert all(f"{out}/checkpoints/{NEWEST} is damaged: stale file handle; " in command.err for command in refused)
    run_ranks(2, *arguments, "checkpoint.fallback=true", hook=other_state, hook_arguments=(rank,))
    assert contents(out / "model") == contents(folder / "out" / "model")
