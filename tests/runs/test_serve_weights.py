"""Hostile and stale folders of weights: refused at once, the server keeps its weights and takes the next ones."""

import functools
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import slow
from kit.loading_memory import read_manifest
from kit.on_policy_runs import write_on_policy_run
from kit.ranks import Ranks
from kit.runs import Command, refused_changes, run
from kit.serving import Server, load_nothing, load_weights, publish_scaled
from kit.stub_servers import stub_server
from kit.stub_vllm import Vllm
from kit.writer_cases import Student, engine_of, requests_of
from safetensors.torch import load_file, save_file

from stillhouse.config.servers import ServerError
from stillhouse.loops import weights_on_servers
from stillhouse.output.folder import RunFolder
from stillhouse.rollout.publish import version_folder
from stillhouse.rollout.published_folder import MANIFEST
from stillhouse.serving.client import pool

WEIGHTS, TENSOR = "model.safetensors", "model.layers.0.self_attn.q_proj.weight"
SETTINGS: dict[str, Any] = {"train.steps": 6, "rollout.max_new_tokens": 9, "rollout.engine": "stillhouse"}
#: changes a published folder
Edit = Callable[[Path], object]


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with Server(folder, "--generate") as running:
        yield running


@pytest.fixture(scope="module")
def published(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_scaled(folder, tmp_path_factory.mktemp("weights"), 7, 0.5)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def named(name: str) -> Edit:
    """The manifest names another file, with its right hash."""

    def make(target: Path) -> None:
        sha256 = digest(target / name) if (target / name).is_file() else "0" * 64
        edit(target, lambda manifest: manifest["files"].update({name: sha256}))

    return make


def above(target: Path) -> None:
    shutil.copy(target / WEIGHTS, target.parent / "above.safetensors")
    named("../above.safetensors")(target)


def in_a_subfolder(target: Path) -> None:
    (target / "more").mkdir()
    shutil.move(target / WEIGHTS, target / "more" / WEIGHTS)
    place = f"more/{WEIGHTS}"

    def move(manifest: dict[str, Any]) -> None:
        manifest["files"][place] = manifest["files"].pop(WEIGHTS)
        manifest["tensors"] = dict.fromkeys(manifest["tensors"], place)

    edit(target, move)


def replaced(make: Edit, name: str = WEIGHTS) -> Edit:
    def replace(target: Path) -> None:
        (target / name).unlink()
        make(target / name)

    return replace


def a_link(target: Path) -> None:
    """To a file with the right content."""
    shutil.move(target / WEIGHTS, target.parent / WEIGHTS)
    (target / WEIGHTS).symlink_to(target.parent / WEIGHTS)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**42)


def cut(name: str) -> Edit:
    return lambda target: (target / name).write_bytes((target / name).read_bytes()[:-5])


def other_tensors(
    change: Callable[[dict[str, torch.Tensor], dict[str, Any]], object], *, hashed: bool = True
) -> Edit:
    """Changes the tensors and the manifest. hashed: the manifest has the new hash."""

    def make(target: Path) -> None:
        tensors = load_file(target / WEIGHTS)

        def update(manifest: dict[str, Any]) -> None:
            change(tensors, manifest)
            save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
            if hashed:
                manifest["files"][WEIGHTS] = digest(target / WEIGHTS)

        edit(target, update)

    return make


def without_a_tensor(tensors: dict[str, torch.Tensor], manifest: dict[str, Any]) -> None:
    del tensors[TENSOR], manifest["tensors"][TENSOR]


def with_another_tensor(tensors: dict[str, torch.Tensor], manifest: dict[str, Any]) -> None:
    tensors["model.more"] = torch.zeros(1)
    manifest["tensors"]["model.more"] = WEIGHTS


def completion(server: Server) -> list[Any]:
    body = {"token_ids": [5, 17], "sampling_params": {"max_tokens": 5, "seed": 9, "logprobs": 0}}
    [choice] = server.client.post("/inference/v1/generate", json=body).json()["choices"]
    return [choice["token_ids"], choice["logprobs"], choice["weight_versions"]]


@pytest.mark.parametrize(("change", "text"), refused_changes("folder of weights"))
def test_a_folder_is_refused_at_once_and_the_next_one_is_loaded(
    server: Server, published: Path, tmp_path: Path, change: str, text: str
) -> None:
    target = version_folder(tmp_path, 7)
    shutil.copytree(published, target)
    eval(change)(target)
    before, started = completion(server), time.monotonic()
    answer = load_weights(server, target if target.exists() else version_folder(tmp_path, 8), "refused")
    assert time.monotonic() - started < 10
    assert answer.status_code == 400, answer.text
    assert text in answer.json()["error"]["message"]
    assert completion(server) == before
    assert load_weights(server, published, tmp_path.name).status_code == 200


def test_another_place_or_version_is_refused(server: Server, folder: Path, published: Path, tmp_path: Path) -> None:
    before = completion(server)
    for target, version, message in [
        ("weights/version-00000007", "7", "expected an absolute path"),
        (tmp_path / "nowhere", "7", "no complete version"),
        (folder, "7", "no complete version"),
        (folder / "config.json", "7", "no complete version"),
        ("/" + "a" * 4000, "7", "no complete version"),
        ("/a\0b", "7", "expected an absolute path"),
        (published, "two words", "version: String should match"),
        (published, "", "version: String should match"),
        (published, "a" * 129, "version: String should match"),
    ]:
        answer = load_weights(server, target, version)
        assert answer.status_code == 400, answer.text
        assert message in answer.json()["error"]["message"]
    assert completion(server) == before


def test_weights_are_read_below_their_root_alone(folder: Path, published: Path, tmp_path: Path) -> None:
    root, beside, way_in = tmp_path / "root", tmp_path / "root beside", tmp_path / "way in"
    inside = publish_scaled(folder, root, 7, 0.5)
    shutil.copytree(published, outside := version_folder(beside, 7))
    (root / "link").symlink_to(beside)
    way_in.symlink_to(root)
    assert "'no' does not exist" in run("serve", folder, "--generate", "--weights-root", "no", code=2).err
    with Server(folder, "--generate", "--weights-root", str(way_in)) as server:
        for place in (outside, root / "link" / outside.name, root / ".." / beside.name / outside.name, "/nowhere"):
            error = load_weights(server, place, "7").json()["error"]
            assert error["message"] == f"{place} is not inside the folder of this server's --weights-root"
        assert "No such file" in load_weights(server, root / "nowhere", "7").json()["error"]["message"]
        assert [load_weights(server, parent / inside.name, "7").status_code for parent in (root, way_in)] == [200] * 2


def test_only_the_manifest_that_a_run_has_published_is_loaded(server: Server, folder: Path, tmp_path: Path) -> None:
    """As after a file system that shows an older folder, with right hashes."""
    first = publish_scaled(folder, tmp_path / "first", 7, 0.5)
    second = publish_scaled(folder, tmp_path / "second", 7, 0.6)
    named_manifest = {"version": "named", "manifest": digest(second / MANIFEST)}
    answer = server.client.post("/v1/weights", json={"folder": str(first), **named_manifest})
    assert answer.status_code == 400
    assert "has another manifest than its run has published" in answer.json()["error"]["message"]
    assert server.client.post("/v1/weights", json={"folder": str(second), **named_manifest}).status_code == 200


def test_a_folder_that_changes_while_it_is_read_leaves_the_weights(folder: Path, tmp_path: Path) -> None:
    """Its files are cut short after they were compared: what was compared is what is loaded."""
    target = publish_scaled(folder, tmp_path, 7, 0.5)
    with Server(folder, "--generate", hook=cut_before_apply, hook_arguments=(str(target / WEIGHTS),)) as server:
        assert load_weights(server, target, "7").status_code == 200
        assert (target / WEIGHTS).stat().st_size == 0
        again = publish_scaled(folder, tmp_path, 8, 0.6)
        assert load_weights(server, again, "8").status_code == 200
        completion(server)


def cut_before_apply(path: str) -> None:
    from stillhouse.serving.server.weight_updates import WeightUpdates

    apply = WeightUpdates.apply

    def cutting(updates: WeightUpdates) -> None:
        if updates._waiting:
            os.truncate(path, 0)
        apply(updates)

    WeightUpdates.apply = cutting  # type: ignore[method-assign]


# the trainer's proof


def older_under_newer_number() -> None:
    """Version 3 has the files of version 2, with right hashes, when the servers are told of it."""
    publish = weights_on_servers.publish

    @functools.wraps(publish)
    def publishing(student: Any, folder: Path, version: int, **options: Any) -> Path:
        final = publish(student, folder, version, **options)
        if version == 3:
            shutil.rmtree(final)
            shutil.copytree(version_folder(folder, 2), final)
            edit(final, lambda manifest: manifest.update(version=3))
            read_manifest(final)
        return final

    weights_on_servers.publish = publishing


OTHER_LAYOUTS = [slow(f"{axis}=2") for axis in ("tensor", "pipeline")]


@pytest.mark.parametrize("layout", ["fsdp=2", *OTHER_LAYOUTS])
def test_a_server_that_loads_nothing_is_found_under_every_layout(tmp_path: Path, layout: str) -> None:
    write_on_policy_run(tmp_path, **SETTINGS, **{"rollout.url": "http://x"})
    with Server(tmp_path / "student", "--generate", hook=load_nothing) as server:
        arguments = ("distill", tmp_path / "run.yaml", f"rollout.url={server.url}", f"parallel.{layout}")
        ranks = Ranks(2, *arguments)
        assert ranks.wait(120) == [1, 1], ranks.texts
        message = f"{server.url} says that it generates with version 1, and its log-probabilities are those of other"
        assert message in ranks[0].err, ranks[0].err
        assert "Traceback" not in ranks.err


def test_an_older_version_under_a_newer_number_is_found_although_its_hashes_are_right(tmp_path: Path) -> None:
    write_on_policy_run(tmp_path, **SETTINGS, **{"rollout.url": "http://x"})
    with Server(tmp_path / "student", "--generate") as server:
        arguments = ("distill", tmp_path / "run.yaml", f"rollout.url={server.url}")
        command = Command(*arguments, hook=older_under_newer_number)
        assert command.wait(120) == 1, command.out + command.err
        assert "generates with version 3, and its log-probabilities are those of other weights" in command.err
        assert "Traceback" not in command.err
        run(*arguments)  # it continues from the checkpoint at which it has stopped


def test_a_server_that_comes_back_is_proved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what was proved when the version was new: the trainer's weights are newer now."""
    monkeypatch.setattr(pool, "FIRST_PAUSE", 0.01)
    student = Student(tmp_path)
    with (
        stub_server(Vllm, tmp_path / "model", processed=True) as server,
        closing(engine_of(server, probes=requests_of(3))) as engine,
    ):
        engine.update_weights(1, student.published(1))
        for request, probe in zip(requests_of(3), engine.weights.probed[server.url], strict=True):
            student.assert_written(request, probe, temperature=1.0, count=8)
        engine.weights.set_proved(server.url, 1e-3)
        server.restart()
        server.model.change(load=lambda *_, **__: None)
        [future] = engine.generate(requests_of(1))
        with pytest.raises(ServerError, match="says that it has version 1, but generates with other weights"):
            future.result(30)


def test_weights_of_another_run_are_refused_although_version_and_hashes_are_right(tmp_path: Path) -> None:
    folder = Student(tmp_path).published(1)
    with (
        stub_server(Vllm, tmp_path / "model", processed=True) as server,
        closing(engine_of(server, run="this")) as engine,
    ):
        with pytest.raises(ValueError, match=r"holds weights of the run '', not of this run 'this'"):
            engine.update_weights(1, folder)
        edit(folder, lambda manifest: manifest.update(run="this"))
        engine.update_weights(1, folder)


# the folder of a run


def test_runs_at_the_same_path_and_copies_of_a_run_have_folders_of_their_own(tmp_path: Path) -> None:
    first = RunFolder(tmp_path / "out")
    first.path.mkdir()
    identity = first.identity()
    assert first.identity() == identity
    shutil.copytree(first.path, tmp_path / "copy")
    first.path.rename(tmp_path / "elsewhere")  # such as the same path on another machine
    other = RunFolder(tmp_path / "out")
    other.path.mkdir()
    assert len({identity, other.identity(), RunFolder(tmp_path / "copy").identity()}) == 3


@pytest.mark.slow
def test_two_runs_with_one_weights_folder_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Both have the same path, as on two machines."""
    shared = tmp_path / "shared"
    of_weights = {"rollout.url": "http://x", "rollout.weights": str(shared), "checkpoint.every": 2}
    write_on_policy_run(tmp_path, **SETTINGS, **of_weights)
    with Server(tmp_path / "student", "--generate") as server:
        arguments = ("distill", tmp_path / "run.yaml", f"rollout.url={server.url}")
        run(*arguments, "train.steps=3")
        [folder] = shared.iterdir()
        assert read_manifest(version_folder(folder, 2)).run == folder.name
        (tmp_path / "out").rename(tmp_path / "first")
        run(*arguments)
    assert len(list(shared.iterdir())) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["version-00000001", "version-00000002"]
