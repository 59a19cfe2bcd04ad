"""The report that is served while a run goes on, and the page of several runs."""

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from kit.config_cases import refused_calls
from kit.report_runs import Page, make_run

from stillhouse.cli import cli
from stillhouse.report.command import ReportServer
from stillhouse.report.page import config_differences, read_runs, write_report


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "distilled", steps=10, every=5)


@pytest.fixture
def server(run_dir: Path) -> Iterator[ReportServer]:
    with ReportServer(run_dir) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def answer_of(server: ReportServer, path: str = "/", **headers: str) -> tuple[int, str, str | None]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    result = answer.status, answer.read().decode(), answer.getheader("ETag")
    connection.close()
    return result


def test_the_page_is_sent_again_only_when_a_file_has_changed(server: ReportServer, run_dir: Path) -> None:
    status, page, version = answer_of(server)
    assert status == 200
    assert "connect-src &#39;self&#39;" in page
    assert version is not None
    assert answer_of(server, If_None_Match=version)[:2] == (304, "")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "later/metric": 7}\n')
    status, page, later = answer_of(server, If_None_Match=version)
    assert (status, later != version) == (200, True)
    assert "later/metric" in page
    assert not (run_dir / "report.html").exists()


def test_a_damaged_file_is_named_until_it_is_whole_again(server: ReportServer, run_dir: Path) -> None:
    path, intact, damaged = run_dir / "data.json", run_dir / "intact", run_dir / "damaged"
    damaged.write_text("[")
    path.rename(intact)
    for target, message in ((damaged, "not JSON"), ("/proc/self/mem", "cannot be read: [Errno 5]")):
        path.symlink_to(target)
        status, text, _ = answer_of(server)
        assert (status, f"data.json: {message}" in text) == (503, True)
        path.unlink()
    intact.rename(path)
    assert answer_of(server)[0] == 200


def test_only_this_machine_gets_the_page_of_a_run_on_a_free_port(
    server: ReportServer, run_dir: Path, tmp_path: Path
) -> None:
    assert server.server_address[0] == "127.0.0.1"
    status, text, _ = answer_of(server, Host="attacker.example")
    assert (status, "distilled" in text) == (403, False)
    assert answer_of(server, Host=f"localhost:{server.server_port}")[0] == 200
    assert answer_of(server, "/metrics.jsonl")[0] == 404
    with pytest.raises(ValueError, match=r"^--port: \d+ on 127\.0\.0\.1 cannot be used"):
        ReportServer(run_dir, port=server.server_port)
    with pytest.raises(ValueError, match="contains no run"):
        ReportServer(tmp_path)


def test_several_runs_have_a_page_of_their_own(run_dir: Path, tmp_path: Path) -> None:
    others = [make_run(tmp_path / f"run-{seed}", steps=10, every=5, seed=seed) for seed in (1, 2)]
    config = others[1] / "config.yaml"
    config.write_text(config.read_text().replace("2e-5", "3e-5").replace("seed: 0", "seed: 2\ndata: {train: '<b>'}"))
    arguments = ["report", str(run_dir), "--compare", *map(str, others)]
    out = run_dir / "compare.html"  # the run's own page stays
    for options, path in (([], out), (["--out", str(tmp_path / "compared.html")], tmp_path / "compared.html")):
        result = CliRunner().invoke(cli, [*arguments, *options], catch_exceptions=False)
        assert result.output == f"{path}\n"
    assert (tmp_path / "compared.html").read_bytes() == out.read_bytes()
    page = Page(out)
    assert page.data["runs"] == ["distilled", "run-1", "run-2"]
    assert [series["run"] for series in page.data["charts"][0]["series"]] == [0, 1, 2]
    last = json.loads((others[0] / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"→ {last['eval/cross_entropy']:.3f}" in page.text
    table = page.source.partition('<table class="differences">')[2].partition("</table>")[0]
    rows = [[cell.partition("<")[0] for cell in row.split("<td>")[1:]] for row in table.split("<tr>")[2:]]
    assert rows == [["2e-05", "2e-05", "3e-05"], ["0", "0", "2"], ["not set", "not set", "&lt;b&gt;"]]
    assert "Configuration of distilled" in page.text
    assert not list(tmp_path.glob("*/report.html"))
    assert "Differences of configuration" not in write_report(run_dir).read_text()


def test_a_section_that_only_one_run_has_is_compared_once(tmp_path: Path) -> None:
    """The section itself, null in the other run, has no row; a value that is no section has one."""
    runs = [make_run(tmp_path / name, steps=10, every=5) for name in ("a", "b")]
    for run, text in zip(
        runs, ("{adapter: {lora: {r: 4}}, eval: 0.1}", "{adapter: null, eval: {a: x}}"), strict=True
    ):
        (run / "config.yaml").write_text(f"student: {text}\n")
    names = ("student.adapter.lora.r", "student.eval", "student.eval.a")
    values = (["4", "not set"], ["0.1", "not set"], ["not set", "x"])
    assert config_differences(read_runs(runs)) == list(zip(names, values, strict=True))


@pytest.mark.parametrize(("call", "message"), refused_calls("options of report"))
def test_options_that_do_not_fit(run_dir: Path, tmp_path: Path, call: str, message: str) -> None:
    arguments = eval(call)
    (tmp_path / "b").mkdir()
    arguments = [str(tmp_path / "b") if argument == "b" else argument for argument in arguments]
    result = CliRunner().invoke(cli, ["report", str(run_dir), *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_the_teacher_and_named_sets_have_curves(run_dir: Path) -> None:
    values = {"eval/teacher_cross_entropy": 3.0, "eval/code/cross_entropy": 4.0, "eval/code/agreement": 0.5}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 10, **values}) + "\n")
    page = Page(write_report(run_dir))
    first = page.data["charts"][0]
    assert first["sides"] == ["student", "teacher"]
    shown = [(series["side"], series["values"] == [3.0]) for series in first["series"]]
    assert shown == [("student", False), ("teacher", True)]
    titles = [chart["title"] for chart in page.data["charts"]]
    start = titles.index("Held out: code: Held-out cross-entropy")
    assert titles[start + 1] == "Held out: code: Held-out agreement"
    assert page.data["charts"][start]["sides"] == [""]
    assert titles.index("Training: Learning rate") > start


def test_smoothing_of_a_long_curve_starts_from_means(run_dir: Path) -> None:
    values = [1.0 if step % 5 else 11.0 for step in range(5000)]
    path = run_dir / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "eval/forward_kl": {value}}}\n' for step, value in enumerate(values)))
    (chart,) = Page(write_report(run_dir)).data["charts"]
    (series,) = chart["series"]
    shown = sum(series["values"]) / len(series["values"])
    mean = sum(series["means"]) / len(series["means"])
    assert shown == pytest.approx(6.0)
    assert mean == pytest.approx(3.0)
