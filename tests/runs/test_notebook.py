"""The notebook of the first ten minutes runs from top to bottom in a new kernel, in an empty folder."""

import os
import sys
from pathlib import Path

import pytest
from kit.runs import ROOT

NOTEBOOK = ROOT / "examples" / "first_ten_minutes.ipynb"
pytestmark = pytest.mark.slow


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells), "the notebook is kept without outputs"

    commands = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", os.pathsep.join((commands, os.environ["PATH"])))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # nothing is compiled, which would take half of the time
    (tmp_path / "work").mkdir()
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path / "work")}})
    client.execute()

    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "error: " not in printed
    for expected in ("nats per token", "gradient norm", "held-out cross entropy", "step  8", "the report has"):
        assert expected in printed, printed
