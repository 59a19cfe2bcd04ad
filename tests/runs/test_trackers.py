"""wandb, mlflow and trackio with their real libraries, offline: what they have after a run that was resumed."""

import importlib
import json
import os
import re
import struct
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from kit import slow
from kit.add_ons import installed, write_distribution
from kit.fork_server import fork_server
from kit.ranks import Ranks
from kit.runs import wait_for, write_run

from stillhouse.config import ConfigError, TrainConfig
from stillhouse.output.folder import RunFolder
from stillhouse.output.log import RunLog
from stillhouse.output.progress import Progress
from stillhouse.output.tracking import FILE, open_trackers, require_trackers

Curves = dict[str, list[tuple[int, float]]]
JSD = "loss/jsd(0.5)_nats_per_token"
JSD_IN_MLFLOW = "loss/jsd_0.5__nats_per_token"
VALUES = {"student.model": "a/b", "train.learning_rate": 2e-5, "eval.tasks": ["sums"], "seed": 0}


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": (tmp_path / "mlflow").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("missing", ["log", "close"])
def test_a_tracker_without_a_method_is_named_at_the_start(tmp_path: Path, missing: str) -> None:
    methods = "".join(f"    {name} = print\n" for name in {"log", "close"} - {missing})
    write_distribution(
        tmp_path / "site",
        {"stillhouse.trackers": {"csv": "curves:Csv"}},
        {"curves.py": f"class Csv:\n    library, in_folder = 'csv', False\n{methods}"},
    )
    expected = f"^track: csv is .*Csv.*, which has no `{missing}`: expected a `Tracker` class"
    with installed(tmp_path / "site"), pytest.raises(ValueError, match=expected):
        open_trackers(RunFolder(tmp_path), ["csv"], Progress(), values={}, warn=print)


def mlflow_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_")}


def write(folder: Path, track: list[str], steps: range, log_bytes: int = 0) -> int:
    """Log these steps as a process of a run does; returns the length of the log after step 3."""
    folder.mkdir(exist_ok=True)
    after_three = 0
    with RunLog(RunFolder(folder), Progress(step=steps[0] - 1, log_bytes=log_bytes), 9, track, VALUES) as log:
        for step in steps:
            speed = {"speed/tokens_per_second": 1.0}
            log.train(step, 10 * step, {JSD: step / 2, "nan": float("nan")} | speed)
            if step % 2 == 0:
                log.evaluation(step, 10 * step, {"eval/cross_entropy": step / 4})
            if step == 3:
                after_three = log.position[0]
    return after_three


def of_mlflow(_: Path) -> tuple[Curves, int, dict[str, Any]]:
    mlflow = importlib.import_module("mlflow")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("stillhouse")
    runs = client.search_runs([experiment.experiment_id])
    curves = {}
    for key in runs[0].data.metrics:
        curves[key] = [(point.step, point.value) for point in client.get_metric_history(runs[0].info.run_id, key)]
    return curves, len(runs), runs[0].data.params


def leveldb_records(path: Path) -> Iterator[bytes]:
    """The records of a file in the format of LevelDB's log, after wandb's own 7 bytes."""
    data, at, record = path.read_bytes(), 7, b""
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:  # a block ends with zeros where no header fits
            at += left
            continue
        if len(data) < at + 7:
            return  # a header that is being written
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if len(data) < at + 7 + length:
            return
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def of_wandb(folder: Path) -> tuple[Curves, int, dict[str, Any]]:
    """From the files of all processes, in their order, as `wandb sync` reads them."""
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    curves, ids, config = defaultdict(list), set(), {}

    def read(path: Path) -> list[Any]:
        return [records.Record.FromString(data) for data in leveldb_records(path)]

    def is_complete(path: Path) -> bool:
        records_of_run = read(path)
        return bool(records_of_run) and records_of_run[-1].WhichOneof("record_type") == "exit"

    paths = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.parent.stat().st_ctime_ns)
    wait_for(lambda: all(map(is_complete, paths)))  # wandb's own process writes the end of a file later
    for path in paths:
        for record in read(path):
            if record.WhichOneof("record_type") == "run":
                ids.add((record.run.run_id, record.run.display_name, record.run.project))
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.WhichOneof("record_type") == "history":
                items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                for key, value in items.items():
                    if not key.startswith("_"):
                        curves[key].append((items["_step"], value))
    return dict(curves), len(ids), config


def of_trackio(_: Path) -> tuple[Curves, int, dict[str, Any]]:
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    (name,) = storage.get_runs("stillhouse")
    curves = defaultdict(list)
    for row in storage.get_logs("stillhouse", name):
        for key, value in row.items():
            if "/" in key:
                curves[key].append((row["step"], value))
    return dict(curves), 1, storage.get_run_config("stillhouse", name)


def of_tensorboard(folder: Path) -> tuple[Curves, int, dict[str, Any]]:
    """TensorBoard gets no configuration; values that are not finite are kept."""
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    curves = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    del curves["nan"]
    return curves, 1, VALUES


READERS: dict[str, Callable[[Path], tuple[Curves, int, dict[str, Any]]]] = {
    "mlflow": of_mlflow,
    "wandb": of_wandb,
    "trackio": of_trackio,
    "tensorboard": of_tensorboard,
}


@pytest.mark.parametrize("name", ["mlflow", slow("wandb"), "trackio", "tensorboard"])
def test_a_resumed_run_continues_its_curves_with_each_step_once(tmp_path: Path, name: str) -> None:
    """Killed at steps 6 and 5 after a checkpoint of step 3: the second process has fewer steps than the first."""
    pytest.importorskip(name)
    folder = tmp_path / "qwen3"
    at_checkpoint = write(folder, [name], range(1, 7))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    write(folder, [name], range(4, 6), at_checkpoint)
    write(folder, [name], range(4, 9), at_checkpoint)
    curves, runs, config = READERS[name](folder)
    assert curves == {
        JSD_IN_MLFLOW if name == "mlflow" else JSD: [(step, step / 2) for step in range(1, 9)],
        "eval/cross_entropy": [(step, step / 4) for step in range(2, 9, 2)],
        "speed/tokens_per_second": [(step, 1.0) for step in range(1, 9)],
    }
    assert runs == 1
    assert str(config["train.learning_rate"]) == "2e-05"


def test_a_run_that_begins_again_has_each_step_once_in_tensorboard(tmp_path: Path) -> None:
    write(tmp_path, ["tensorboard"], range(1, 7))
    write(tmp_path, ["tensorboard"], range(1, 5))
    assert of_tensorboard(tmp_path)[0][JSD] == [(step, step / 2) for step in range(1, 5)]


def test_a_copy_of_a_run_folder_does_not_write_into_the_original_curves(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    write(tmp_path / "a", ["mlflow"], range(1, 4))
    (tmp_path / "a").rename(tmp_path / "b")
    with pytest.raises(ValueError, match=r"trackers\.json belongs to the run a, and this folder is b; remove"):
        write(tmp_path / "b", ["mlflow"], range(1, 4))
    before = (tmp_path / "b" / FILE).read_bytes()
    write(tmp_path / "b", [], range(1, 4))  # without a tracker, it does not matter
    assert (tmp_path / "b" / FILE).read_bytes() == before
    (tmp_path / "b" / FILE).write_text('{"name": "b", "id": 3}')
    write(tmp_path / "b", [], range(1, 4))
    with pytest.raises(ValueError, match=r"trackers\.json is damaged: .*; remove"):
        write(tmp_path / "b", ["mlflow"], range(1, 4))


@pytest.mark.parametrize("last", [5, 9])
def test_steps_that_were_made_without_a_tracker_are_not_taken_for_sent(tmp_path: Path, last: int) -> None:
    """Tracked to step 7, made again without it to step 5 or 9, and tracked to step 10: each step is there once."""
    pytest.importorskip("mlflow")
    folder = tmp_path / "run"
    at_checkpoint = write(folder, ["mlflow"], range(1, 8))
    write(folder, [], range(4, last + 1), at_checkpoint)
    write(folder, ["mlflow"], range(4, 11), at_checkpoint)
    curves, runs, _ = of_mlflow(folder)
    assert curves[JSD_IN_MLFLOW] == [(step, step / 2) for step in range(1, 11)]
    assert runs == 1


def test_a_tracker_that_fails_is_left_out_with_one_warning_and_the_next_process_sends_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """mlflow's store of files is lost after step 4; then its library raises `Exception` itself."""
    pytest.importorskip("mlflow")
    folder, store, gone = tmp_path / "run", tmp_path / "mlflow", tmp_path / "gone"
    folder.mkdir()
    with RunLog(RunFolder(folder), Progress(), 9, ["mlflow"], VALUES) as log:
        for step in range(1, 8):
            if step == 5:
                store.rename(gone)
                store.touch()
            log.train(step, 10 * step, {"a": step, "speed/tokens_per_second": 1.0})
            if step == 3:
                at_checkpoint = log.position[0]
    store.unlink()
    gone.rename(store)
    (warning,) = (line for line in capsys.readouterr().out.splitlines() if "warning" in line)
    assert re.match(r"warning: track: mlflow failed at step 5 \(Exception: .*metrics\.jsonl has all metrics", warning)
    assert (folder / "metrics.jsonl").read_text().count("\n") == 7
    with RunLog(RunFolder(folder), Progress(step=3, log_bytes=at_checkpoint), 9, ["mlflow"], VALUES) as log:
        for step in range(4, 10):
            log.train(step, 10 * step, {"a": step, "speed/tokens_per_second": 1.0})
    assert of_mlflow(folder)[0]["a"] == [(step, step) for step in range(1, 10)]


def test_one_that_cannot_start_leaves_no_run_of_another_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("wandb")
    folder = tmp_path / "run"
    monkeypatch.setenv("WANDB_CONSOLE", "sideways")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^track: wandb cannot start a run; log in"):
            write(folder, ["mlflow", "wandb"], range(1, 4))
        (run,) = mlflow.search_runs(experiment_names=["stillhouse"], output_format="list")
        assert run.info.status == "FAILED"
    write(folder, ["mlflow"], range(1, 4))
    (run,) = mlflow.search_runs(experiment_names=["stillhouse"], output_format="list")
    assert run.info.status == "FINISHED"
    assert len(of_mlflow(folder)[0][JSD_IN_MLFLOW]) == 3


def test_a_silent_server_of_mlflow_fails_before_the_job_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    variables = importlib.import_module("mlflow.environment_variables")
    names = ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    for name in names:
        monkeypatch.setenv(name, "")  # so that what a run sets is undone
        monkeypatch.delenv(name)
    write(tmp_path / "run", ["mlflow"], range(1, 3))
    seconds, retries = (getattr(variables, name).get() for name in names)
    pauses = variables.MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR.get() * (2**retries - 1)
    assert (1 + retries) * seconds + pauses < TrainConfig.model_fields["timeout"].default / 4


class _Wandb(BaseHTTPRequestHandler):
    """As much of a server as a run needs to start. It does not answer to what the run sends afterwards."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        begins = b"mutation UpsertBucket" in body
        if not begins and (self.path != "/graphql" or b"mutation" in body):
            time.sleep(60)
            return
        project = {"id": "p", "name": "stillhouse", "entity": {"id": "e", "name": "me"}}
        bucket = {"id": "b", "name": "x", "displayName": "x", "config": "{}", "project": project}
        started = {"upsertBucket": {"bucket": bucket, "inserted": True}}
        viewer = {"viewer": {"id": "v", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        answer = json.dumps({"data": started if begins else viewer}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


def _log_online(folder: str, port: int) -> None:
    from stillhouse.output import trackers

    trackers.WANDB_SECONDS = 2.0
    proxies = [name for name in os.environ if name.lower().endswith("_proxy")]
    for name in ("WANDB_MODE", *proxies):
        os.environ.pop(name, None)
    os.environ |= {"WANDB_BASE_URL": f"http://127.0.0.1:{port}", "WANDB_API_KEY": "a" * 40, "WANDB_SILENT": "true"}
    run = RunFolder(Path(folder))
    with (
        (run.path / "printed").open("w") as file,
        redirect_stdout(file),
        RunLog(run, Progress(), 9, ["wandb"], VALUES) as log,
    ):
        log.train(1, 10, {"loss/x": 1.0, "speed/tokens_per_second": 1.0})
    os._exit(0)  # wandb ends its own process at exit


@pytest.mark.slow
def test_a_silent_server_of_wandb_does_not_hold_up_the_end_of_a_run(tmp_path: Path) -> None:
    """The model is written after the trackers are closed, and wandb itself waits for its server without a limit."""
    pytest.importorskip("wandb")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Wandb) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        process = fork_server().Process(target=_log_online, args=(str(tmp_path), server.server_port), daemon=True)
        process.start()
        process.join(40)
        printed = (tmp_path / "printed").read_text()
        server.shutdown()
    if process.exitcode is None:
        process.kill()
    assert process.exitcode == 0
    assert printed.count("warning: track: wandb failed at the end (TimeoutError: ") == 1


@pytest.mark.parametrize("has_folder", [False, True])
@pytest.mark.parametrize("name", READERS)
def test_a_library_that_is_missing_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, has_folder: bool
) -> None:
    """A folder of its name is no library: wandb writes one where it runs, and `python -m` imports from there."""
    if has_folder:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ConfigError, match=rf"^track: {name} is not installed; pip install 'stillhouse\[{name}\]'$"):
        require_trackers([name])


def test_a_library_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trackio.py").write_text("raise AttributeError('numpy has no float_')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    with pytest.raises(ValueError, match=r"^track: trackio is installed, but cannot be imported: .* no float_"):
        write(tmp_path / "run", ["trackio"], range(1, 3))


@pytest.mark.slow
def test_one_that_cannot_start_ends_all_ranks_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rank 0 opens it. The other rank neither waits for rank 0 nor complains of having lost it."""
    pytest.importorskip("mlflow")
    write_run(tmp_path, track=["mlflow"])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "run.yaml").as_uri())
    ranks = Ranks(2, "distill", tmp_path / "run.yaml", environment=mlflow_variables())
    assert ranks.wait() == [1, 1]
    [error] = [line for line in ranks[0].err.splitlines() if line.startswith("error")]
    assert error.startswith("error: track: mlflow cannot start or continue a run at file:")
    assert ranks[1].err == error.replace("error:", "error on rank 1:") + "\n"
