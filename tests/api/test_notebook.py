"""The notebook of the examples runs from its first cell to its last.

`python -m tests.api.test_notebook` writes what its cells show now into the file.
"""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
PATH = ROOT / "examples" / "inspect_a_plan.ipynb"


def _executed() -> nbformat.NotebookNode:
    notebook = nbformat.read(PATH, as_version=4)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", record_timing=False)
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT)})
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if "text/html" in output.data:
                del output.data["text/plain"]  # the fields of a plan
    return notebook


def _outputs(notebook: nbformat.NotebookNode) -> dict[str, tuple[list[str], str]]:
    """Last line of a cell -> kinds of what it shows, and the text of it."""
    shown = {}
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.outputs:
            (output,) = cell.outputs
            text = output.data.get("text/html") or output.data["text/plain"]
            shown[cell.source.splitlines()[-1]] = sorted(output.data), text
    return shown


@pytest.fixture(scope="module")
def executed() -> nbformat.NotebookNode:
    return _executed()


def test_cells_show_what_they_are_about(executed: nbformat.NotebookNode) -> None:
    text = {line: text for line, (_, text) in _outputs(executed).items()}
    assert "Plan for 32 devices, mesh (data=4, model=8), on dgx-h100" in text["plan"]
    assert "state/params/layers/up" in text["plan"]
    assert "100.0%" in text["plan.time()"]
    assert "residuals" in text["plan.memory()"]
    assert "(planned)" in text['plan.explain("params/layers/up")']
    assert "layers recomputed" in text['plan.what_if(memory_budget="8GB")']
    assert "stored otherwise" in text["plan.diff(fsdp)"]
    assert text['plan.shardings(state)["params"]'].startswith("{'embed': P")
    assert text['autopar.Plan.load(folder / "plan.json") == plan'] == "True"


def test_the_file_has_outputs_of_the_same_kinds(executed: nbformat.NotebookNode) -> None:
    kinds = [{line: kinds for line, (kinds, _) in _outputs(n).items()} for n in (nbformat.read(PATH, 4), executed)]
    assert kinds[0] == kinds[1]
    assert kinds[0]['Image(folder / "plan.png")'] == ["image/png", "text/plain"]


if __name__ == "__main__":
    nbformat.write(_executed(), PATH)
