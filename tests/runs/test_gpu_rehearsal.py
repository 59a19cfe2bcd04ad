"""`make gpu` on a machine without a GPU: stages start, do their work with tiny sizes, and end."""

from pathlib import Path

import pytest
from kit.benchmark_stage import run_module
from kit.fork_server import fork_server
from kit.runs import ROOT

from benchmarks import gpu

run_process = gpu.run_process


@pytest.mark.slow
def test_the_first_stage_of_each_kind_passes_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other stages run the same module with other options, and all tests of a GPU are one kind."""
    kinds: dict[str, tuple[int, str]] = {}
    for number, stage in enumerate(gpu.stages("cpu"), start=1):
        kinds.setdefault(stage.arguments[1], (number, stage.name))
    assert len(kinds) > 5
    numbers = [str(number) for number, _ in kinds.values()]
    monkeypatch.setattr("sys.argv", ["gpu", "--rehearse", "--minutes", "20", "--stages", *numbers])
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    monkeypatch.setattr(gpu, "run_process", run_in_a_fork)
    gpu.main()
    shown = capsys.readouterr().out
    names = {name for _, name in kinds.values()}
    outcomes = dict(line.rsplit(": ", 1) for line in shown.splitlines() if line.rpartition(": ")[0] in names)
    assert outcomes.keys() == names
    assert all(outcome.startswith("passed after") for outcome in outcomes.values()), shown
    # the parts of a rehearsal did real work
    assert "tokens per second" in shown
    assert "run_tokens_per_second" in shown


def run_in_a_fork(command: list[str], seconds: float, log: Path, rehearse: bool) -> str:
    """Run a stage's module in a fork of the server, which has imported torch, and a stage of tests by itself."""
    _, _, module, *arguments = command
    if module == "pytest":
        return run_process(command, seconds, log, rehearse)
    process = fork_server().Process(target=run_module, args=(module, arguments, ROOT, log))
    process.start()
    process.join(seconds)
    process.kill()
    return "passed" if process.exitcode == 0 else f"failed with exit code {process.exitcode}"
