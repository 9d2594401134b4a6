"""Every notebook runs from top to bottom in a fresh kernel of this interpreter, and is kept without outputs."""

import json
import pathlib
import sys

import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture
def kernel(tmp_path, monkeypatch) -> str:
    """The name of a kernel that runs this interpreter, away from the user's own Jupyter, IPython and cache."""
    kernelspec = pytest.importorskip("ipykernel.kernelspec")
    kernelspec.install(prefix=str(tmp_path), kernel_name="under-test")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")  # a kernel that dies shows where
    return "under-test"


def run(notebook, kernel: str, folder: pathlib.Path):
    client = pytest.importorskip("nbclient").NotebookClient(
        notebook, timeout=600, kernel_name=kernel, resources={"metadata": {"path": str(folder)}}
    )
    return client.execute()


def test_there_are_notebooks():
    assert NOTEBOOKS


@each_notebook
def test_is_kept_without_outputs(path):
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code
    assert not [cell["id"] for cell in code if cell["outputs"] or cell["execution_count"] is not None]


@pytest.mark.slow
@each_notebook
def test_runs_in_a_fresh_kernel(path, kernel, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("JZERO_NOTEBOOK_STEPS", "4")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell("import sys; print(sys.executable)"))
    done = run(notebook, kernel, path.parent)  # raises CellExecutionError, which shows the cell
    *cells, last = [cell for cell in done.cells if cell.cell_type == "code"]
    assert last.outputs[0].text.strip() == sys.executable
    plots = [cell for cell in cells if "plt.show()" in cell.source]
    assert plots
    assert all(any("image/png" in output.get("data", {}) for output in cell.outputs) for cell in plots)


@pytest.mark.slow
def test_a_cell_that_raises_fails_the_run(kernel, tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="ZeroDivisionError"):
        run(notebook, kernel, tmp_path)
