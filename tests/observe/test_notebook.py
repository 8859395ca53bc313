"""What the cells of a notebook show of a run: a real kernel executes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launching import SCRIPTS

CELLS = [
    f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})\nfrom basics import *\nimport time",
    "for report in make().steps(data, epochs=2):\n    time.sleep(0.05)",
    "for report in make(model=lambda: net()[0].double()).steps(data, epochs=1):\n    time.sleep(0.05)",
    "def train(rate):\n    from basics import make, data\n    trainer = make()\n"
    "    for report in trainer.steps(data, epochs=3):\n        time.sleep(rate)\n    return report.step\n"
    "paceline.launch(train, 0.1, workers=2, run_dir='run')",
]


def displayed(cell: Any) -> list[dict[str, str]]:
    return [output["data"] for output in cell["outputs"] if output["output_type"] == "display_data"]


def printed(cell: Any) -> str:
    return "".join(output["text"] for output in cell["outputs"] if output["output_type"] == "stream")


@pytest.mark.slow
def test_cells_show_a_bar(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="no nbclient: pip install nbclient ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="no nbclient: pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="no ipykernel: pip install nbclient ipykernel")
    cells = [nbformat.v4.new_code_cell(text) for text in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    _, first, second, launched = notebook["cells"]
    (shown,) = displayed(first)
    assert '<progress value="1.0000" max="1"' in shown["text/html"]
    assert "<b>step 8/8</b>" in shown["text/html"]
    assert shown["text/plain"].startswith("step 8/8  epoch 2/2  loss ")
    (both,) = displayed(second)
    assert both["text/plain"].startswith("step 12/12  epoch 1/1  loss Sequential ")
    assert ", Linear " in both["text/plain"]
    (shown,) = displayed(launched)
    assert '<progress value="1.0000" max="1"' in shown["text/html"]
    assert shown["text/plain"].startswith("step 12/12  epoch 3/3  loss ")
    assert "step 12/12" not in printed(launched)
    assert "finished at step 12" in printed(launched)
    assert [output["data"]["text/plain"] for output in launched["outputs"] if "execution_count" in output] == ["12"]
